//! Tasks that keep to the keys of one node each, and what each task has done.
//!
//! Invariant: each counter is written by one task only, so counting costs other tasks nothing.

use std::sync::atomic::{AtomicU64, Ordering};

use super::Kv;
use crate::workload;

/// Maximum number of records that a task looks at to find one of its node.
const LOOKS_MAX: u64 = 4096;

/// Operations that succeeded, and that failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Number of operations that succeeded.
    pub done: u64,
    /// Number of operations that failed.
    pub errors: u64,
}

/// Counters of one task, in a cache line of their own.
#[derive(Default)]
#[repr(align(128))]
struct Slot {
    done: AtomicU64,
    errors: AtomicU64,
}

/// Counters of all tasks.
pub(super) struct Parts {
    tasks: Box<[Slot]>,
    records: u64,
}

impl Parts {
    pub(super) fn new(tasks: u32, records: u64) -> Parts {
        Parts { tasks: (0..tasks).map(|_| Slot::default()).collect(), records }
    }

    /// Returns the first record from `key` on that the node of this task holds. If it holds none nearby, returns `key`.
    #[inline]
    pub(super) fn key<K: Kv>(&self, kv: &K, key: u64, task: u32) -> u64 {
        let shard = task as usize % kv.shards();
        let mut records = (key..self.records).chain(0..key).take(LOOKS_MAX as usize);
        records.find(|record| kv.shard_of(&workload::key(*record)) == shard).unwrap_or(key)
    }

    #[inline]
    pub(super) fn count(&self, task: u32, is_done: bool) {
        let slot = &self.tasks[task as usize];
        let counter = if is_done { &slot.done } else { &slot.errors };
        // Relaxed: nothing else is read by way of the counter.
        counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Returns what the tasks of each of `shards` nodes have done so far.
    pub(super) fn counted(&self, shards: usize) -> Vec<Counted> {
        let mut counted = vec![Counted::default(); shards];
        for (task, slot) in self.tasks.iter().enumerate() {
            let of = &mut counted[task % shards];
            of.done += slot.done.load(Ordering::Relaxed);
            of.errors += slot.errors.load(Ordering::Relaxed);
        }
        counted
    }
}
