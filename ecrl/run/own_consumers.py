"""Check the consumers that a caller passes to `ecrl.train`."""

from collections.abc import Callable, Iterator

from torch import Tensor

from ecrl.distributed import world_size
from ecrl.errors import UserError
from ecrl.run.loggers import ending
from ecrl.types import LogData

Consumer = Callable[[Iterator[LogData]], Iterator[LogData]]
"""Type of a consumer: a function that takes the records of a run, and returns an iterator of the same records."""


def with_own_consumer(records: Iterator[LogData], consumer: Consumer) -> Iterator[LogData]:
    """Pass the records through a consumer of the caller.

    The consumer may add logs to a record. In a run of one process, the consumer may also end the run early, by
    returning. If the consumer has taken a record and returns without yielding the record, the function yields the
    record unchanged, because otherwise the newest state would be lost.

    Args:
        records: records of the run.
        consumer: generator function that takes `records` and yields every record again.

    Raises: UserError if `consumer` returns no iterator, takes the next record before it has yielded the last one, or
        yields a record twice. UserError also if `consumer` yields something other than a record, yields a log that is
        not a 0-d tensor, or ends a run of several processes early.

    >>> def first_two(records):
    ...     for _, record in zip(range(2), records):
    ...         yield record
    >>> [record["n"] for record in with_own_consumer(iter([{"n": n, "logs": {}} for n in range(5)]), first_two)]
    [0, 1]
    """
    name, taken, yielded, ended = getattr(consumer, "__name__", str(consumer)), 0, 0, False
    newest: list[LogData] = []

    def source() -> Iterator[LogData]:
        nonlocal taken, ended
        for record in records:
            taken += 1
            newest[:] = [record]
            yield record
            if yielded < taken:
                problem = f"consumers: {name} asked for the next record, but did not yield the last record"
                raise UserError(f"{problem}; yield every record once, before you take the next one")
        ended = True

    with ending(records):
        if not callable(consumer):
            raise UserError(f"consumers: {consumer!r} is not a function; write a generator function that takes records")
        iterator = consumer(source())
        if not isinstance(iterator, Iterator):
            problem = f"consumers: {name} returned {type(iterator).__name__}, expected an iterator of records"
            raise UserError(f"{problem}; write a generator function that yields every record")
        for record in iterator:
            if not newest:
                raise UserError(f"consumers: {name} yielded before it took a record; yield every record that it takes")
            if not isinstance(record, dict) or not newest[0].keys() <= record.keys():
                problem = f"consumers: {name} yielded {type(record).__name__}, which is not a record"
                raise UserError(f"{problem}; yield every record, or a copy with more logs")
            for log, value in record["logs"].items():
                if not isinstance(value, Tensor) or value.ndim:
                    problem = f"consumers: {name} yielded the log {log!r}, {value!r}, expected a 0-d tensor"
                    raise UserError(f"{problem}; use torch.tensor(number)")
            yielded += 1
            if yielded > taken:
                raise UserError(f"consumers: {name} yielded a record twice; yield every record once")
            yield {**record, "logs": {log: value.detach().cpu() for log, value in record["logs"].items()}}
        if not ended and world_size() > 1:
            problem = f"consumers: {name} ended the records early, but the other processes train on"
            raise UserError(f"{problem}; in a run of several processes, yield all records")
        if taken > yielded:
            yield newest[0]
