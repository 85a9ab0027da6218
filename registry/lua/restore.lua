-- Fill an empty registry, keeping version numbers; one that was ever written stays as it is.
-- KEYS: epoch, revision, adapters, versions, numbers, changes
-- ARGV: fresh epoch, then for each version, in rising order of numbers:
--       adapter field, number, content, created (unix s), packed version
-- Returns {'ok', epoch, revision} or {'not empty'}.
local epoch, revision, adapters, versions, numbers, changes = unpack(KEYS)
if redis.call('EXISTS', epoch, revision, adapters, versions, numbers, changes) > 0 then
  return {'not empty'}
end
redis.call('SET', epoch, ARGV[1])
for i = 2, #ARGV, 5 do
  local field, number, content, created, packed = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]
  local head = redis.call('HGET', adapters, field)
  local born, first
  if head then born, first = string.match(head, '^(%d+) (%d+) ') end
  redis.call('HSET', adapters, field, table.concat({born or created, first or number, number, content}, ' '))
  redis.call('HSET', versions, field .. '/' .. number, packed)
  redis.call('HSET', numbers, field, number)
end
redis.call('SET', revision, '1')
redis.call('XADD', changes, '1-0', 'op', 'reset', 'epoch', ARGV[1])
return {'ok', ARGV[1], '1'}
