//! Physical floor of a key-value store: its GET and its overwrite written by hand.
//!
//! The floor is a hash table of slots that point to items, in one shared mapping. A GET hashes the key, loads the slot,
//! compares the key in the item and copies the item out. An overwrite writes an item into a spare buffer, finds the
//! slot in the same way, and swaps the buffer into the slot. There is no chain, no check of rights and no protocol, so
//! the floor costs only the memory accesses. Every fabric on the same host is compared with the floor.
//!
//! Invariant: this module shares no code with the systems that it measures, so that one mistake cannot hide on both
//! sides.
//! Invariant: any number of threads may measure concurrently. Without spare buffers, `build` is the last to write the
//! memory.
//! Invariant: an item's first address does not depend on its key. Neighbours in the table are not neighbours in memory.

mod by_hand;
mod echo;
mod mapping;
mod measure;
mod overwrite;
mod table;

use std::fmt;
use std::io;
use std::sync::{Mutex, PoisonError};

/// `ByHand` is exported for this package's benchmarks, which may not use `unsafe`.
#[doc(hidden)]
pub use by_hand::ByHand;
pub use echo::{ANSWER_TIMEOUT, ECHO_VALUE_SIZE_MAX, Echo, EchoClient, Echoed, Medium};
use measure::Draws;
pub use measure::Measured;
use overwrite::Spare;
use table::Table;

/// Maximum number of keys that [`Floor::measure`] fetches together.
pub const TASKS_MAX: usize = 64;

/// Operations that a floor performs. Each workload has the name of YCSB's workload with the same shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// Half of the operations are reads, and half overwrites. Which ones is random.
    A,
    /// All operations are reads.
    C,
}

impl Workload {
    /// Returns the workload with this name.
    pub fn named(name: &str) -> Option<Self> {
        [Self::A, Self::C].into_iter().find(|workload| workload.name() == name)
    }

    /// Name of the workload in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::A => "a",
            Self::C => "c",
        }
    }

    /// Number of spare buffers that the workload needs for each task.
    pub fn spares(self) -> u32 {
        match self {
            Self::A => 1,
            Self::C => 0,
        }
    }
}

/// Contents of a floor's table, and their layout in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Number of items, 1 to 2^32. Their keys are the numbers below this number.
    pub records: u64,
    /// Size of each value in bytes, at most 16 MiB.
    pub value_size: u32,
    /// Number of buffers besides those of the records: [`Workload::spares`] for each task that runs at the same time.
    pub spares: u32,
    /// Whether every key has its own slot, by a bijection. Otherwise keys are hashed, with linear probing.
    pub collision_free: bool,
    /// Whether the mapping uses huge pages.
    pub huge_pages: HugePages,
    /// Seed of the hash, of the items' places and of the drawn keys.
    pub seed: u64,
}

/// Whether the mapping uses pages of 2 MiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HugePages {
    /// The mapping uses the host's small pages, 4 KiB on x86.
    #[default]
    No,
    /// The mapping uses 2 MiB pages if enough are reserved or the kernel creates them, else small pages.
    /// [`Measured::page_size`] has the actual size.
    IfAvailable,
    /// The mapping uses 2 MiB pages. If there are too few, `build` returns an error with the number of pages to
    /// reserve.
    Required,
}

/// Items in shared memory and the table that finds them.
pub struct Floor {
    table: Table,
    draws: Draws,
    /// Spare buffers that no running measurement has.
    spares: Mutex<Vec<Spare>>,
}

impl Floor {
    /// Maps the memory of a floor with this layout and fills it.
    ///
    /// # Errors
    /// `InvalidInput` for a layout out of range; `Unsupported` if the CPU lacks an instruction for overwrites;
    /// otherwise the operating system's error for the allocation.
    pub fn build(layout: Layout) -> io::Result<Self> {
        let (table, spares) = Table::build(layout)?;
        Ok(Self { table, draws: Draws::new(&layout, Workload::A), spares: Mutex::new(spares) })
    }

    /// Returns the key numbers that [`Floor::measure`] fetches in a cycle, drawn uniformly when the floor was built. A
    /// system that is compared with the floor should fetch the same keys.
    pub fn keys(&self) -> &[u32] {
        &self.draws.keys
    }

    /// Checks that each key has a whole value in a buffer of its own, and that no buffer was lost.
    ///
    /// # Errors
    /// `InvalidData` if the overwrites have broken the table: then this program or the host is faulty.
    pub fn check(&mut self) -> io::Result<()> {
        self.table.check_buffers(self.spares.get_mut().unwrap_or_else(PoisonError::into_inner))
    }

    /// Copies the item of key number `key` into `out`, which grows as needed. Returns the value; `None` if the key is
    /// absent.
    pub fn get<'out>(&self, key: u64, out: &'out mut Vec<u8>) -> Option<&'out [u8]> {
        self.table.get(key, out)
    }
}

impl fmt::Debug for Floor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Floor").field("layout", self.table.layout()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(collision_free: bool) -> Layout {
        Layout {
            records: 3000,
            value_size: 100,
            spares: 0,
            collision_free,
            huge_pages: HugePages::No,
            seed: 7,
        }
    }

    #[test]
    fn a_get_returns_the_bytes_of_its_key_in_both_layouts() {
        for collision_free in [false, true] {
            let floor = Floor::build(layout(collision_free)).unwrap();
            let mut out = Vec::new();
            for key in 0..3000 {
                assert_eq!(floor.get(key, &mut out), Some(&table::value(key as u8, 100)[..]), "key {key}");
            }
            assert_eq!(floor.get(3000, &mut out), None);
            assert_eq!(floor.get(u64::MAX, &mut out), None);
        }
    }

    #[test]
    fn a_layout_out_of_range_is_refused() {
        for wrong in [
            Layout { records: 0, ..layout(true) },
            Layout { records: (1 << 32) + 1, ..layout(true) },
            Layout { value_size: (16 << 20) + 1, ..layout(true) },
        ] {
            assert_eq!(Floor::build(wrong).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{wrong:?}");
        }
    }

    #[test]
    fn keys_are_drawn_from_the_whole_range_and_depend_on_the_seed() {
        let floor = Floor::build(layout(true)).unwrap();
        assert_eq!((floor.keys().iter().min(), floor.keys().iter().max()), (Some(&0), Some(&2999)));
        let other = Floor::build(Layout { seed: 8, ..layout(true) }).unwrap();
        assert_ne!(floor.keys()[..64], other.keys()[..64]);
    }
}
