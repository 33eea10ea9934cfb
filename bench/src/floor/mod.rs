//! The physical floor of a key-value GET: the same fetch done by hand.
//!
//! A hash table of slots that point at items, both in one shared mapping; a GET hashes the key, loads the
//! slot, compares the key in the item and copies the item out. No chain, no key check, no protocol: what this
//! costs is what the memory costs, and every fabric on the same host is judged against it.
//!
//! Invariant: this room shares no code with what it judges, lest a mistake on both sides cancel out.
//! Invariant: after `build` nothing is written, so any number of threads may measure at once.
//! Invariant: an item's address says nothing about its key; neighbours in the table are strangers in memory.

mod by_hand;
mod echo;
mod mapping;
mod measure;
mod table;

use std::fmt;
use std::io;

/// For this package's benchmarks, which are outside the walls of `unsafe`.
#[doc(hidden)]
pub use by_hand::ByHand;
pub use echo::{ANSWER_TIMEOUT, ECHO_VALUE_SIZE_MAX, Echo, EchoClient, Echoed, Medium};
pub use measure::Measured;
use measure::draw_keys;
use table::Table;

/// Most keys fetched together by [`Floor::measure`].
pub const TASKS_MAX: usize = 64;

/// What a floor holds and how it lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Items, whose keys are the numbers below it; at least 1, at most 2^32.
    pub records: u64,
    /// Bytes of value in each item; at most 16 MiB.
    pub value_size: u32,
    /// Gives every key a slot of its own, by a bijection in place of a hash; else keys are hashed and probe
    /// linearly.
    pub collision_free: bool,
    /// Pages that the mapping is made of.
    pub huge_pages: HugePages,
    /// Seeds the hash, the places of the items and the keys drawn.
    pub seed: u64,
}

/// Whether the mapping lies on 2 MiB pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HugePages {
    /// The host's small pages, 4 KiB on x86.
    #[default]
    No,
    /// 2 MiB pages if enough are reserved or the kernel makes some, else small ones; [`Measured::page_size`] says
    /// which.
    IfAvailable,
    /// 2 MiB pages, or an error that says how many to reserve.
    Required,
}

/// Items in shared memory and the table that finds them.
pub struct Floor {
    table: Table,
    keys: Vec<u32>,
}

impl Floor {
    /// Maps and fills the memory.
    ///
    /// # Errors
    /// `InvalidInput` for a layout out of range; otherwise what the operating system answered when asked for
    /// memory.
    pub fn build(layout: Layout) -> io::Result<Self> {
        Ok(Self { table: Table::build(layout)?, keys: draw_keys(&layout) })
    }

    /// The key numbers that [`Floor::measure`] fetches, in order, over and over: drawn uniformly when the
    /// floor was built. Whoever is compared with the floor should fetch the same.
    pub fn keys(&self) -> &[u32] {
        &self.keys
    }

    /// Copies the item of key number `key` into `out`, which grows as needed, and returns the value in it;
    /// `None` if there is no such key.
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
        Layout { records: 3000, value_size: 100, collision_free, huge_pages: HugePages::No, seed: 7 }
    }

    #[test]
    fn a_get_returns_the_bytes_of_its_key_in_both_layouts() {
        for collision_free in [false, true] {
            let floor = Floor::build(layout(collision_free)).unwrap();
            let mut out = Vec::new();
            for key in 0..3000 {
                assert_eq!(floor.get(key, &mut out), Some(&table::value(key, 100)[..]), "key {key}");
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
