//! Filling an empty tree with sorted pairs, for benchmarks.
//!
//! The root is written last, so a client that dies meanwhile leaves a tree without keys.

use super::node::{ALLOCATOR, Entry, ROOT, Right, allocate, encode};
use super::{Btree, BtreeError, LEAF, LEVELS_MAX, write_node};
use farside_remote::Fabric;
use farside_remote::clock::Clock;

impl<F: Fabric + Clock + 'static> Btree<F> {
    /// Loads pairs in ascending order of their keys into a tree without keys, with `fill` entries in each node. The
    /// root and the last node of each level have what is left. No other client may use the tree meanwhile.
    ///
    /// # Errors
    /// [`BtreeError`]. If an operation on a node failed, some nodes may be lost, and the tree may still be empty.
    pub async fn load(&mut self, pairs: &[(u64, u64)], fill: usize) -> Result<(), BtreeError> {
        let entries_max = self.shape.entries_max;
        if !pairs.is_sorted_by(|one, next| one.0 < next.0) {
            return Err(BtreeError::NotSorted);
        }
        self.read(ROOT).await?;
        let root = self.node(ROOT)?;
        if root.level != LEAF || !root.entries.is_empty() {
            return Err(BtreeError::NotEmpty);
        }
        let has_several = pairs.len() > entries_max;
        if fill == 0 || fill > entries_max || (has_several && fill < 2) {
            return Err(BtreeError::Fill { entries_max });
        }
        let mut entries: Vec<Entry> = pairs.iter().map(|&(key, value)| Entry::new(key, value)).collect();
        // The whole tree must fit before its first node is written.
        let (mut levels, mut nodes, mut left) = (1, 0, entries.len());
        while left > entries_max {
            left = left.div_ceil(fill);
            nodes += left as u64;
            levels += 1;
        }
        if levels > LEVELS_MAX {
            return Err(BtreeError::TreeFull { entries_max });
        }
        let shape = self.shape;
        let taken =
            self.fresh.with_exclusive(ALLOCATOR, async |content| allocate(content, nodes, shape)).await;
        let mut next = taken.map_err(BtreeError::of)??;
        let mut level = LEAF;
        while entries.len() > entries_max {
            let numbers = next..next + entries.len().div_ceil(fill) as u64;
            entries = self.load_level(level, &entries, fill, numbers.start).await?;
            (next, level) = (numbers.end, level + 1);
        }
        let written = self.nodes.with_exclusive(ROOT, async |content| encode(content, level, None, &entries));
        written.await.map_err(BtreeError::of)?;
        self.settle().await
    }

    /// Writes the nodes of a level below the root. Their numbers begin with `first`. Returns the entries of their
    /// parents.
    async fn load_level(
        &mut self,
        level: u32,
        entries: &[Entry],
        fill: usize,
        first: u64,
    ) -> Result<Vec<Entry>, BtreeError> {
        // Each child takes the keys before its first one, too, if it is the first of its level.
        let key_of = |place: usize, chunk: &[Entry]| match place {
            0 => 0,
            _ => chunk.first().map_or(0, |entry| entry.key()),
        };
        let chunks: Vec<&[Entry]> = entries.chunks(fill).collect();
        let mut parents = Vec::with_capacity(chunks.len());
        for (place, chunk) in chunks.iter().enumerate() {
            let node = first + place as u64;
            let next =
                chunks.get(place + 1).map(|next| Right { node: node + 1, bound: key_of(place + 1, next) });
            write_node(&mut self.fresh, node, level, next, chunk).await?;
            parents.push(Entry::new(key_of(place, chunk), node));
        }
        Ok(parents)
    }
}
