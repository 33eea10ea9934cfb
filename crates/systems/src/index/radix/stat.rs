//! The shape of the tree: nodes by type, leaves, depth, and what is locked or left behind. Also for audits.

use super::layout::{Class, Leaf, NodeType, NodeView, Slot, View, leaf_of, lock_at, pointer_of};
use super::scan::{Reads, Wanted};
use super::{Damaged, Tree};
use crate::index::{IndexError, Shape};
use crate::lease::LockWord;
use farside_remote::Fabric;
use farside_remote::clock::Clock;
use std::collections::BTreeSet;

/// Size of the state of a unit of memory in bytes.
const STATE_SIZE: u64 = 8;

/// Number of nodes and leaves that one wave reads.
const READS_PER_WAVE: usize = 32;

/// Shape of a tree. If other clients change the tree meanwhile, the numbers are approximate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    /// Number of nodes with 4, 8, 16, 32, 64, 128 and 256 slots in use, and then of copied nodes with 4, 16, 48 and
    /// 256.
    pub nodes: [u64; 11],
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
    /// Number of leaves, and of copied nodes, whose locks are held.
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

impl<F: Fabric + Clock> Tree<F> {
    /// Walks the whole tree.
    ///
    /// # Errors
    /// [`IndexError`]; nothing was changed.
    pub(in crate::index) async fn stat(&self) -> Result<Stat, IndexError> {
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
                    View::Node { at, kind, .. } if kind.is_copied() => {
                        Wanted { at, len: kind.class().size() }
                    }
                    View::Node { at, kind, .. } => Wanted { at, len: kind.whole_len().into() },
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
                    View::Node { kind, .. } => {
                        if kind.is_copied() {
                            stat.locked += u64::from(is_locked(kind.class(), bytes));
                        }
                        let node = NodeView::of(bytes.get(..kind.whole_len() as usize).unwrap_or(bytes))?;
                        let kind = node.header()?.kind;
                        stat.nodes[usize::from(kind.0) - 1] += 1;
                        let slots = node.slots().enumerate().filter(|(_, slot)| !slot.is_null());
                        let slots = slots.map(|(index, slot)| (slot, depth + 1, index < kind.slots()));
                        let before = left.len();
                        left.extend(slots);
                        stat.slots +=
                            left[before..].iter().filter(|(.., is_visible)| *is_visible).count() as u64;
                    }
                    View::Null | View::Empty => {}
                }
            }
        }
        Ok(stat)
    }

    /// Returns the shape of the tree in the form of every index. Its nodes are of these types.
    ///
    /// # Errors
    /// [`IndexError`]; nothing was changed.
    pub(in crate::index) async fn shape(&self, types: &[NodeType]) -> Result<Shape, IndexError> {
        let stat = self.stat().await?;
        let taken = self.taken_units().await?;
        let count = |kind: &NodeType| (kind.slots() as u64, stat.nodes[usize::from(kind.0) - 1]);
        Ok(Shape {
            nodes: types.iter().map(count).collect(),
            slots: stat.slots,
            leaves: None,
            keys: stat.leaves,
            dead: stat.dead,
            locked: stat.locked,
            depth: stat.depth,
            bytes: taken.keys().map(|(_, class)| class.size() + STATE_SIZE).sum(),
        })
    }

    fn count_leaf(
        &self,
        stat: &mut Stat,
        (generation, class, is_visible): (u32, Class, bool),
        bytes: &[u8],
    ) -> Result<(), IndexError> {
        stat.locked += u64::from(is_locked(class, bytes));
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

/// Whether the lock at the end of a unit is held.
fn is_locked(class: Class, unit: &[u8]) -> bool {
    let lock = unit.get(lock_at(class) as usize..).unwrap_or_default();
    let lock = lock.try_into().map(u64::from_le_bytes).map(LockWord::of_bits).unwrap_or_default();
    !lock.is_free()
}
