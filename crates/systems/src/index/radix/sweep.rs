//! Finds units that dead clients have left behind: taken, and in no slot. For `heal`.
//!
//! A client may die between taking a unit and linking it, or between unlinking a leaf and freeing its unit. The sweep
//! 1. notes all units that are taken, with their generations;
//! 2. waits a grace: the operations that were in progress have ended, so each noted unit is linked, or never will be in
//!    its generation;
//! 3. walks the tree, and keeps the units that no slot has;
//! 4. waits a grace: no operation has read a pointer to them any more;
//! 5. frees them by CAS, if they still have their generations.
//!
//! A value that lies apart is linked by its leaf, and the walk reads the leaves, too. It may also be linked later: a
//! dead client's update, which its redo record has, is completed by a recoverer. So values are freed only if, while the
//! sweep waited, each client that was there at the beginning has gone on and none has left or was recovered. Then no
//! update that began before can still be completed: its client has ended it, and a recoverer of it began before, too,
//! and has a guard.
//!
//! A unit that is linked throughout the walk is found: slots lead to the same paths for ever, and a node that is
//! replaced by a copy keeps its slots while the sweep's guard is held. The walk reads
//! all slots of a node, also those that are not visible yet. A live client may free a unit in its limbo at the same
//! time: the CAS of one of them fails.
//!
//! Invariant: a unit that an operation gives back has another generation then. So a unit with its noted generation was
//! not taken anew.

use super::layout::{Chunk, Claim, Class, Far, Growth, Leaf, NodeView, Slot, View, leaf_of, pointer_of};
use super::scan::{Reads, Wanted};
use super::{Tree, layout::State};
use crate::index::IndexError;
use crate::index::session::WORDS_PER_READ;
use farside_remote::Fabric;
use farside_remote::clock::Clock;
use std::collections::{BTreeMap, BTreeSet};

/// Number of nodes, and of leaves, that one wave reads.
const NODES_PER_WAVE: usize = 16;
const LEAVES_PER_WAVE: usize = 64;

/// Number of times that the sweep waits until no client has left meanwhile.
const GRACES: usize = 8;

/// Units that are taken, with their generations.
pub(in crate::index) type Taken = BTreeMap<(Far, Class), u32>;

impl<F: Fabric + Clock> Tree<F> {
    /// Frees the units that dead clients have left behind. Returns their number. Takes about half the length of a
    /// lease.
    ///
    /// # Errors
    /// [`IndexError`]; some units may have been freed.
    pub(in crate::index) async fn sweep(&self, lane: u16) -> Result<u64, IndexError> {
        let mut taken = self.taken_units().await?;
        if taken.is_empty() {
            return Ok(0);
        }
        let is_apart = |class: &Class| class.is_of_value();
        let mut have_left = self.session.grace(lane).await?;
        for _ in 1..GRACES {
            if !have_left || !taken.keys().any(|(_, class)| is_apart(class)) {
                break;
            }
            have_left = self.session.grace(lane).await?;
        }
        if have_left {
            taken.retain(|(_, class), _| !is_apart(class));
        }
        self.drop_linked(&mut taken).await?;
        self.session.grace(lane).await?;
        let leaked = taken.into_iter().map(|((at, class), generation)| (at, class, generation));
        self.units.free_leaked(&self.session, leaked, &self.counts).await
    }

    /// Units that are taken.
    pub(in crate::index) async fn taken_units(&self) -> Result<Taken, IndexError> {
        let (layout, mut taken) = (&self.session.layout, Taken::new());
        for (member, table) in layout.members.iter().enumerate() {
            for first in (0..table.pieces).step_by(WORDS_PER_READ as usize) {
                let count = (table.pieces - first).min(WORDS_PER_READ);
                let claims = self.session.words(layout.claim(Chunk { member, number: first }), count).await?;
                for (number, word) in (first..).zip(claims) {
                    if let Some(claim) = Claim::of(word)? {
                        self.taken_in(Chunk { member, number }, claim.class, &mut taken).await?;
                    }
                }
            }
        }
        Ok(taken)
    }

    async fn taken_in(&self, chunk: Chunk, class: Class, taken: &mut Taken) -> Result<(), IndexError> {
        let layout = &self.session.layout;
        let units = layout.units(class);
        for first in (0..units).step_by(WORDS_PER_READ as usize) {
            let count = (units - first).min(WORDS_PER_READ);
            let states = self.session.words(layout.state(chunk, first), count).await?;
            for (unit, word) in (first..).zip(states) {
                let state = State::of(word);
                if state.is_taken {
                    taken.insert((layout.unit(chunk, class, unit), class), state.generation);
                }
            }
        }
        Ok(())
    }

    /// Walks the tree, and removes from `taken` what it has.
    async fn drop_linked(&self, taken: &mut Taken) -> Result<(), IndexError> {
        // A copied node that is replaced meanwhile is not reused.
        let layout = &self.session.layout;
        let _guard = (layout.spec.nodes == Growth::Copied).then(|| self.session.epochs.enter());
        let root = self.session.words(layout.root(), 1).await?;
        let (mut seen, mut reads) = (BTreeSet::new(), Reads::default());
        let (mut nodes, mut leaves) = (Vec::new(), Vec::new());
        let mut note = |slot: Slot,
                        nodes: &mut Vec<Wanted>,
                        leaves: &mut Vec<(Wanted, u32)>,
                        taken: &mut Taken|
         -> Result<(), IndexError> {
            match layout.view(slot)? {
                View::Null | View::Empty => {}
                View::Leaf { at, class, generation } => {
                    taken.remove(&(at, class));
                    if layout.spec.has_values_apart() {
                        leaves.push((Wanted { at, len: class.size() }, generation));
                    }
                }
                View::Node { at, kind, .. } => {
                    taken.remove(&(at, kind.class()));
                    if seen.insert(at) {
                        nodes.push(Wanted { at, len: kind.whole_len().into() });
                    }
                }
            }
            Ok(())
        };
        for word in root {
            note(Slot(word), &mut nodes, &mut leaves, taken)?;
        }
        while !nodes.is_empty() || !leaves.is_empty() {
            let wave = leaves.split_off(leaves.len().saturating_sub(LEAVES_PER_WAVE));
            let wanted: Vec<Wanted> = wave.iter().map(|(wanted, _)| *wanted).collect();
            self.read_many(&wanted, &mut reads).await?;
            for (index, (_, generation)) in wave.into_iter().enumerate() {
                let bytes = reads.output(index);
                // A torn leaf is being updated, so neither its old value nor its new one has been there from the start.
                if let (Leaf::Whole(_), Some(pointer)) =
                    (leaf_of(&layout.spec, generation, bytes)?, pointer_of(bytes))
                {
                    taken.remove(&(pointer.at, layout.class_of(&pointer)?));
                }
            }
            let wanted = nodes.split_off(nodes.len().saturating_sub(NODES_PER_WAVE));
            self.read_many(&wanted, &mut reads).await?;
            for index in 0..wanted.len() {
                for slot in NodeView::of(reads.output(index))?.slots() {
                    note(slot, &mut nodes, &mut leaves, taken)?;
                }
            }
        }
        Ok(())
    }
}
