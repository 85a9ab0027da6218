-- Delete an adapter with all its versions.
-- KEYS: epoch, revision, adapters, versions, numbers, changes, request
-- ARGV: fresh epoch, request fingerprint, request ttl (s), changes kept, adapter field
-- Returns {'ok', epoch, revision}, {'conflict'} or {'missing'}.
local epoch, revision, adapters, versions, numbers, changes, request = unpack(KEYS)
local fresh, fingerprint, ttl, kept, field = unpack(ARGV)

local done = redis.call('HMGET', request, 'fingerprint', 'revision')
if done[1] then
  if done[1] ~= fingerprint then return {'conflict'} end
  -- Also a write, so that the WAITAOF which follows covers the first attempt.
  redis.call('EXPIRE', request, ttl)
  return {'ok', redis.call('GET', epoch) or '', done[2]}
end

local head = redis.call('HGET', adapters, field)
if not head then return {'missing'} end

local first, last = string.match(head, '^%d+ (%d+) (%d+) ')
for number = tonumber(first), tonumber(last) do
  redis.call('HDEL', versions, field .. '/' .. string.format('%d', number))
end
redis.call('HDEL', adapters, field)
local rev = tostring(redis.call('INCR', revision))
redis.call('XADD', changes, 'MAXLEN', '~', kept, rev .. '-0', 'op', 'delete', 'epoch', redis.call('GET', epoch), 'adapter', field)
redis.call('HSET', request, 'fingerprint', fingerprint, 'revision', rev)
redis.call('EXPIRE', request, ttl)
return {'ok', redis.call('GET', epoch), rev}
