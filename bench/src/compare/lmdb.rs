//! LMDB: a B-tree in a memory-mapped file, which the client reads with its own CPU under a snapshot.
//!
//! A batch of operations runs in one read transaction. The transaction is reset after the batch and renewed for the
//! next, so no transaction is allocated. The writes of a batch are committed together after its reads, without a sync
//! to disk. Values are copied out, as in our systems.
//!
//! Invariant: the file has no name once it is open, so it disappears with this process, even after a crash.

use crate::kv::{Drawn, KvTrouble, Thread, Ycsb, fill, looks_right};
use crate::workload::{Operation, key};
use ::lmdb::{Database, DatabaseFlags, Environment, EnvironmentFlags, Error, Transaction, WriteFlags};
use std::path::Path;
use std::time::Instant;

/// Version of the LMDB library that is built in.
pub const VERSION: &str = "0.9.24 (lmdb-rkv 0.14)";

/// An LMDB environment with one database.
pub struct Lmdb {
    environment: Environment,
    database: Database,
}

/// Number of operations for each sampled latency, as for other rivals.
const SAMPLED: u64 = super::SAMPLED;
/// Number of records in one transaction of the load phase.
const LOADING: u64 = 4096;
const PAGE_SIZE: u64 = 4096;

impl Lmdb {
    /// Creates an environment in `folder` for the records of `ycsb`, then removes the folder.
    ///
    /// # Errors
    /// Returns the reason why the file cannot be created.
    pub fn create(folder: &Path, ycsb: &Ycsb) -> Result<Lmdb, String> {
        let words = |error: Error| format!("LMDB cannot create its file in {}: {error}", folder.display());
        std::fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        let opened = Environment::new()
            // No sync: the other stores do not write to disk either.
            .set_flags(EnvironmentFlags::NO_SYNC | EnvironmentFlags::NO_META_SYNC | EnvironmentFlags::NO_TLS)
            .set_map_size(map_size(ycsb.workload.records, ycsb.value_size))
            .open(folder);
        let removed = std::fs::remove_dir_all(folder);
        let environment = opened.map_err(words)?;
        removed.map_err(|error| format!("{}: {error}", folder.display()))?;
        let database = environment.create_db(None, DatabaseFlags::empty()).map_err(words)?;
        Ok(Lmdb { environment, database })
    }

    /// Stores all records, in the order of their keys. Calls `progress` with the number of new records.
    ///
    /// # Errors
    /// Returns the reason why a record was not stored.
    pub fn load(&self, ycsb: &Ycsb, mut progress: impl FnMut(u64)) -> Result<(), String> {
        let mut value = vec![0; ycsb.value_size];
        for first in (0..ycsb.workload.records).step_by(LOADING as usize) {
            let keys = first..ycsb.workload.records.min(first + LOADING);
            let count = keys.end - keys.start;
            self.write(keys, &mut value, WriteFlags::APPEND).map_err(|error| error.to_string())?;
            progress(count);
        }
        Ok(())
    }

    /// Performs the operations of `thread`, `depth` at a time, while `goes_on` returns true.
    ///
    /// # Errors
    /// Returns the reason why an operation failed.
    pub fn work(
        &self,
        ycsb: &Ycsb,
        thread: &Thread,
        depth: u32,
        goes_on: impl Fn() -> bool,
    ) -> Result<(), String> {
        self.batches(ycsb, thread, depth, goes_on).map_err(|error| error.to_string())
    }

    fn batches(
        &self,
        ycsb: &Ycsb,
        thread: &Thread,
        depth: u32,
        goes_on: impl Fn() -> bool,
    ) -> Result<(), Error> {
        let mut value = vec![0; ycsb.value_size];
        let mut writes: Vec<(Drawn, Option<Instant>)> = Vec::with_capacity(depth as usize);
        let mut idle = self.environment.begin_ro_txn()?.reset();
        let (mut done, mut doubt) = (0u64, 0);
        while goes_on() {
            let mut since = done.is_multiple_of(SAMPLED).then(Instant::now);
            let snapshot = idle.renew()?;
            for _ in 0..depth {
                if !thread.may_begin() {
                    break;
                }
                let drawn = thread.draw(std::mem::take(&mut doubt));
                since = since.or_else(|| done.is_multiple_of(SAMPLED).then(Instant::now));
                done += 1;
                if drawn.operation != Operation::Update {
                    let found = match snapshot.get(self.database, &key(drawn.key)) {
                        Ok(found) => copied(found, &mut value),
                        Err(Error::NotFound) => None,
                        Err(error) => return Err(error),
                    };
                    let is_right = found.is_some_and(|value| looks_right(drawn.key, ycsb.value_size, value));
                    doubt = usize::from(!is_right);
                    if !is_right {
                        thread.count_trouble(&KvTrouble::Wrong(drawn.key));
                    }
                }
                match drawn.operation {
                    Operation::Read => thread.count(drawn, since.take()),
                    _ => writes.push((drawn, since.take())),
                }
            }
            idle = snapshot.reset();
            if !writes.is_empty() {
                let keys = writes.iter().map(|(drawn, _)| drawn.key);
                self.write(keys, &mut value, WriteFlags::empty())?;
                writes.drain(..).for_each(|(drawn, since)| thread.count(drawn, since));
            }
        }
        Ok(())
    }

    /// Stores the given records in one transaction.
    fn write(
        &self,
        keys: impl Iterator<Item = u64>,
        value: &mut [u8],
        flags: WriteFlags,
    ) -> Result<(), Error> {
        let mut transaction = self.environment.begin_rw_txn()?;
        for number in keys {
            fill(number, value);
            transaction.put(self.database, &key(number), &value, flags)?;
        }
        transaction.commit()
    }
}

/// Copies a value to `value`. Returns `None` if the value has the wrong length.
#[inline]
fn copied<'v>(found: &[u8], value: &'v mut [u8]) -> Option<&'v [u8]> {
    if found.len() != value.len() {
        return None;
    }
    value.copy_from_slice(std::hint::black_box(found));
    Some(std::hint::black_box(&*value))
}

/// Returns the size in bytes of the address range for these records, with spare pages for copy-on-write. Unused pages
/// cost no memory.
fn map_size(records: u64, value_size: usize) -> usize {
    let item = value_size as u64 + 32;
    let pages = match PAGE_SIZE / 2 / item {
        0 => records * (item.div_ceil(PAGE_SIZE) + 1),
        _ => records.div_ceil((PAGE_SIZE - 16) / item),
    };
    (pages * 2 * PAGE_SIZE + (1 << 30)) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::{Plan, Run};
    use crate::workload::Workload;
    use std::cell::Cell;

    fn loaded(text: &str, value_size: usize) -> (Run, Lmdb) {
        let folder = tempfile::tempdir().expect("a folder");
        let mut workload = Workload::parse("test", text).expect("a workload");
        workload.records = 5000;
        let plan =
            Plan { workload, value_size, tasks: 1, verify: false, by_node: false, sampled: 64, seed: 3 };
        let run = plan.run().expect("a run");
        let lmdb = Lmdb::create(&folder.path().join("lmdb"), run.work()).expect("a file");
        assert!(!folder.path().join("lmdb").exists(), "the file has no name");
        let mut loaded = 0;
        lmdb.load(run.work(), |count| loaded += count).expect("every record is stored");
        assert_eq!(loaded, 5000);
        (run, lmdb)
    }

    #[test]
    fn every_stored_record_is_read_correctly() {
        let mixes = [
            "readproportion=1\nupdateproportion=0",
            "readproportion=0.5\nupdateproportion=0.5",
            "readproportion=0.5\nupdateproportion=0\nreadmodifywriteproportion=0.5",
        ];
        for (text, value_size, depth) in
            mixes.into_iter().flat_map(|mix| [(mix, 1, 1), (mix, 512, 64), (mix, 9000, 7)])
        {
            let (run, lmdb) = loaded(text, value_size);
            let (thread, left) = (run.thread(0), Cell::new(20));
            lmdb.work(run.work(), &thread, depth, || left.replace(left.get() - 1) > 0).expect("no error");
            let tally = thread.take_tally();
            assert_eq!(
                (tally.operations(), tally.violations),
                (20 * u64::from(depth), 0),
                "{:?}",
                tally.failures
            );
            assert!(tally.latencies.all().count() > 0);
        }
    }

    #[test]
    fn a_wrong_or_missing_value_is_counted() {
        let (run, lmdb) = loaded("readproportion=1\nupdateproportion=0", 64);
        let mut transaction = lmdb.environment.begin_rw_txn().expect("one writer");
        for number in 0..run.work().workload.records {
            match number % 2 {
                0 => transaction.del(lmdb.database, &key(number), None).expect("the record exists"),
                _ => transaction
                    .put(lmdb.database, &key(number), &[0; 63], WriteFlags::empty())
                    .expect("stored"),
            }
        }
        transaction.commit().expect("committed");
        let (thread, left) = (run.thread(0), Cell::new(10));
        lmdb.work(run.work(), &thread, 8, || left.replace(left.get() - 1) > 0).expect("no error");
        assert_eq!(thread.take_tally().violations, 80);
    }
}
