//! The segments of a node's memory that no store owns.
//!
//! Invariant: a segment is free here or assigned to exactly one region in the segment table, never both.

use std::collections::BTreeSet;

/// The free segments of a node.
#[derive(Debug)]
pub struct Extents {
    free: BTreeSet<u32>,
}

impl Extents {
    /// Creates the set of segments 0 to `segments` - 1, all free.
    pub fn new(segments: u32) -> Extents {
        Extents { free: (0..segments).collect() }
    }

    /// Number of free segments.
    pub fn free(&self) -> u32 {
        self.free.len() as u32
    }

    /// Takes the lowest `count` adjacent free segments, and returns the first one's number. `None` if there are no such
    /// segments.
    pub fn take_run(&mut self, count: u32) -> Option<u32> {
        let (mut first, mut len) = (0, 0);
        for &index in &self.free {
            if len == 0 || index != first + len {
                (first, len) = (index, 0);
            }
            len += 1;
            if len >= count {
                break;
            }
        }
        if len < count || count == 0 {
            return None;
        }
        (first..first + count).for_each(|index| assert!(self.free.remove(&index)));
        Some(first)
    }

    /// Takes any `count` segments. Returns `None`, and takes none, if fewer are free.
    pub fn take(&mut self, count: u32) -> Option<Vec<u32>> {
        if self.free() < count {
            return None;
        }
        let taken: Vec<u32> = self.free.iter().copied().take(count as usize).collect();
        taken.iter().for_each(|index| assert!(self.free.remove(index)));
        Some(taken)
    }

    /// Takes segment `index`, which a store already owns when a node takes over.
    ///
    /// # Panics
    /// If the segment is not free.
    pub fn take_exactly(&mut self, index: u32) {
        assert!(self.free.remove(&index), "segment {index} was taken twice");
    }

    /// Frees a segment.
    ///
    /// # Panics
    /// If the segment is free already.
    pub fn give(&mut self, index: u32) {
        assert!(self.free.insert(index), "segment {index} was freed twice");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_contiguous_even_after_holes() {
        let mut extents = Extents::new(10);
        let taken = extents.take(4).expect("ten are free");
        assert_eq!(taken, [0, 1, 2, 3]);
        extents.give(1);
        extents.give(2);
        assert_eq!(extents.take_run(3), Some(4));
        assert_eq!(extents.take_run(2), Some(1));
        assert_eq!(extents.take_run(4), None);
        assert_eq!(extents.take_run(3), Some(7));
        assert_eq!((extents.free(), extents.take(1)), (0, None));
    }
}
