//! The shape of the tree: nodes by type, leaves, depth, and what is locked or left behind. Also for audits.

use super::layout::{Class, Leaf, NodeType, NodeView, Slot, View, leaf_of, lock_at, pointer_of};
use super::scan::{Reads, Wanted};
use super::{Client, Damaged};
use crate::index::IndexError;
use crate::lease::LockWord;
use farside_remote::Fabric;
use farside_remote::clock::Clock;
use std::collections::BTreeSet;

/// Number of nodes and leaves that one wave reads.
const READS_PER_WAVE: usize = 32;

/// Shape of a tree. If other clients change the tree meanwhile, the numbers are approximate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    /// Number of nodes with 4, 8, 16, 32, 64, 128 and 256 slots.
    pub nodes: [u64; 7],
    /// Number of slots in use, those that were emptied included.
    pub slots: u64,
    /// Number of slots that were emptied.
    pub emptied: u64,
    /// Number of leaves with a value.
    pub leaves: u64,
    /// Number of leaves of deleted keys whose slots were not emptied.
    pub dead: u64,
    /// Number of leaves behind the slots in use of their nodes: their writers have not completed the type switch yet,
    /// or have died before. They have no values.
    pub hidden: u64,
    /// Number of values that lie apart.
    pub apart: u64,
    /// Number of leaves whose locks are held.
    pub locked: u64,
    /// Number of nodes above the deepest leaf.
    pub depth: u64,
    /// Number of units of memory that are taken. Those that are neither nodes nor leaves of the tree belong to
    /// operations in progress, wait until they may be reused, or were left behind by dead clients.
    pub taken: u64,
}

impl Stat {
    /// Number of nodes and leaves in slots, and of values that lie apart.
    pub fn linked(&self) -> u64 {
        self.nodes.iter().sum::<u64>() + self.leaves + self.dead + self.hidden + self.apart
    }
}

impl<F: Fabric + Clock> Client<F> {
    /// Walks the whole tree.
    ///
    /// # Errors
    /// [`IndexError`]; nothing was changed.
    pub(super) async fn stat(&self) -> Result<Stat, IndexError> {
        self.session.fetch_keys().await?;
        let _guard = self.session.epochs.enter();
        let layout = &self.session.layout;
        let mut stat = Stat { taken: self.taken_units().await?.len() as u64, ..Stat::default() };
        let root = self.session.words(layout.root(), 1).await?;
        let (mut seen, mut reads) = (BTreeSet::new(), Reads::default());
        // Slots that were not visited, with their depths, and whether they are visible.
        let mut left: Vec<(Slot, u64, bool)> = root.into_iter().map(|word| (Slot(word), 0, true)).collect();
        while !left.is_empty() {
            let wave = left.split_off(left.len().saturating_sub(READS_PER_WAVE));
            let mut wanted = Vec::new();
            let mut views = Vec::new();
            for (slot, depth, is_visible) in wave {
                let read = match layout.view(slot)? {
                    View::Null => continue,
                    View::Empty => {
                        stat.emptied += u64::from(is_visible);
                        continue;
                    }
                    View::Leaf { at, class, .. } => Wanted { at, len: class.size() },
                    View::Node { at, .. } if !seen.insert(at) => {
                        return Err(Damaged("a node with two slots").into());
                    }
                    View::Node { at, .. } => Wanted { at, len: NodeType::MAX.read_len().into() },
                };
                wanted.push(read);
                views.push((layout.view(slot)?, depth, is_visible));
            }
            self.read_many(&wanted, &mut reads).await?;
            for (index, (view, depth, is_visible)) in views.into_iter().enumerate() {
                let bytes = reads.output(index);
                match view {
                    View::Leaf { generation, class, .. } => {
                        self.count_leaf(&mut stat, (generation, class, is_visible), bytes)?;
                        stat.depth = stat.depth.max(depth);
                    }
                    _ => {
                        let node = NodeView::of(bytes)?;
                        let kind = node.header()?.kind;
                        stat.nodes[usize::from(kind.0) - 1] += 1;
                        let slots = node.slots().enumerate().filter(|(_, slot)| !slot.is_null());
                        let slots = slots.map(|(index, slot)| (slot, depth + 1, index < kind.slots()));
                        let before = left.len();
                        left.extend(slots);
                        stat.slots +=
                            left[before..].iter().filter(|(.., is_visible)| *is_visible).count() as u64;
                    }
                }
            }
        }
        Ok(stat)
    }

    fn count_leaf(
        &self,
        stat: &mut Stat,
        (generation, class, is_visible): (u32, Class, bool),
        bytes: &[u8],
    ) -> Result<(), IndexError> {
        let lock = bytes.get(lock_at(class) as usize..).unwrap_or_default();
        let lock = lock.try_into().map(u64::from_le_bytes).map(LockWord::of_bits).unwrap_or_default();
        stat.locked += u64::from(!lock.is_free());
        let leaf = leaf_of(&self.session.layout.spec, generation, bytes)?;
        stat.apart += u64::from(matches!(leaf, Leaf::Whole(_)) && pointer_of(bytes).is_some());
        match leaf {
            _ if !is_visible => stat.hidden += 1,
            Leaf::Whole(leaf) if leaf.head.is_dead() => stat.dead += 1,
            Leaf::Whole(_) | Leaf::Torn(_) => stat.leaves += 1,
            // It was unlinked since its slot was read.
            Leaf::Reused => {}
        }
        Ok(())
    }
}
