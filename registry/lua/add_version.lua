-- Add a version to an adapter, creating the adapter if it is new.
-- KEYS: epoch, revision, adapters, versions, numbers, changes, request
-- ARGV: fresh epoch, request fingerprint, request ttl (s), changes kept,
--       adapter field, content (hex), created (unix s), packed version
-- Returns {'ok', epoch, revision, number, packed version} or {'conflict'}.
-- Content equal to the latest version's is that version: nothing is added.
local epoch, revision, adapters, versions, numbers, changes, request = unpack(KEYS)
local fresh, fingerprint, ttl, kept, field, content, created, packed = unpack(ARGV)

local done = redis.call('HMGET', request, 'fingerprint', 'revision', 'number', 'version')
if done[1] then
  if done[1] ~= fingerprint then return {'conflict'} end
  -- Also a write, so that the WAITAOF which follows covers the first attempt.
  redis.call('EXPIRE', request, ttl)
  return {'ok', redis.call('GET', epoch) or '', done[2], done[3], done[4]}
end

redis.call('SET', epoch, fresh, 'NX')
local head = redis.call('HGET', adapters, field)
local born, first, last, current
if head then born, first, last, current = string.match(head, '^(%d+) (%d+) (%d+) (%x+)$') end

local rev, number
if current == content then
  rev = redis.call('GET', revision)
  number = last
  packed = redis.call('HGET', versions, field .. '/' .. number)
else
  number = tostring(redis.call('HINCRBY', numbers, field, 1))
  redis.call('HSET', adapters, field, table.concat({born or created, first or number, number, content}, ' '))
  redis.call('HSET', versions, field .. '/' .. number, packed)
  rev = tostring(redis.call('INCR', revision))
  redis.call('XADD', changes, 'MAXLEN', '~', kept, rev .. '-0',
    'op', 'add', 'epoch', redis.call('GET', epoch), 'adapter', field, 'number', number, 'version', packed)
end
redis.call('HSET', request, 'fingerprint', fingerprint, 'revision', rev, 'number', number, 'version', packed)
redis.call('EXPIRE', request, ttl)
return {'ok', redis.call('GET', epoch), rev, number, packed}
