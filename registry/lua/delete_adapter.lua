-- Delete an adapter with all its versions.
-- KEYS: epoch, revision, adapters, versions, numbers, changes, request
-- ARGV: fresh epoch, request fingerprint, request ttl (s), changes kept, adapter field
-- Returns {'ok', epoch, revision, {number, packed version, ...}}, {'conflict'} or {'missing'}.
-- A repeated request gets no versions: they are gone.
local epoch, revision, adapters, versions, numbers, changes, request = unpack(KEYS)
local fresh, fingerprint, ttl, kept, field = unpack(ARGV)

local done = redis.call('HMGET', request, 'fingerprint', 'revision')
if done[1] then
  if done[1] ~= fingerprint then return {'conflict'} end
  -- Also a write, so that the WAITAOF which follows covers the first attempt.
  redis.call('EXPIRE', request, ttl)
  return {'ok', redis.call('GET', epoch) or '', done[2], {}}
end

local head = redis.call('HGET', adapters, field)
if not head then return {'missing'} end

local first, last = string.match(head, '^%d+ (%d+) (%d+) ')
local deleted = {}
for number = tonumber(first), tonumber(last) do
  local version = field .. '/' .. string.format('%d', number)
  local packed = redis.call('HGET', versions, version)
  if packed then
    table.insert(deleted, number)
    table.insert(deleted, packed)
  end
  redis.call('HDEL', versions, version)
end
redis.call('HDEL', adapters, field)
local rev = tostring(redis.call('INCR', revision))
redis.call('XADD', changes, 'MAXLEN', '~', kept, rev .. '-0', 'op', 'delete', 'epoch', redis.call('GET', epoch), 'adapter', field)
redis.call('HSET', request, 'fingerprint', fingerprint, 'revision', rev)
redis.call('EXPIRE', request, ttl)
return {'ok', redis.call('GET', epoch), rev, deleted}
