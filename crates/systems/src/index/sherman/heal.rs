//! What dead clients have left behind: locks, splits without separators, and memory. Also the shape of the tree.
//!
//! `heal` watches all leases and recovers the locks of dead clients (`session`). Then it walks the tree, level by level
//! from left to right. It frees the units that were claimed by clients that are gone and that no pointer names, and
//! inserts the separators that the nodes above lack. It frees in five steps:
//! 1. it notes all claimed units, with the nonces in their states;
//! 2. it reads the leases: a client whose nonce is not there has no request in flight, and its locks were recovered, or
//!    a recoverer has them, which holds a guard;
//! 3. it waits until the recoveries in progress have ended;
//! 4. it walks the tree: what such a client has linked is in it, and stays in it;
//! 5. it frees the others by CAS of their states.
//!
//! Without step 3, a recoverer that is slow could redo the split of a dead client after the walk, and link a unit that
//! was freed: another recoverer finds the lock in the first one's name, and frees the dead client's id.
//!
//! Invariant: a unit is freed only if it is in no node's pointers, and the clients that could link it are gone.

use super::Client;
use super::change::Lane;
use super::layout::{Damaged, Far, Root};
use super::memory::swap;
use super::node::{Entry, Image};
use super::walk::Own;
use crate::index::IndexError;
use farside_remote::Fabric;
use farside_remote::clock::Clock;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Number of nodes that one wave reads.
const NODES_PER_WAVE: usize = 32;

/// Shape of a tree. If other clients change the tree meanwhile, the numbers are approximate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    /// Number of leaves.
    pub leaves: u64,
    /// Number of inner nodes.
    pub inner: u64,
    /// Number of keys.
    pub keys: u64,
    /// Number of records of inner nodes.
    pub records: u64,
    /// Number of nodes that no node above names: their separators were not inserted yet, or their writers have died
    /// before.
    pub orphans: u64,
    /// Number of locks that are held.
    pub locked: u64,
    /// Number of levels.
    pub levels: u64,
    /// Number of units that are claimed. Those that are no nodes of the tree are kept by clients for their next splits,
    /// or were left behind by dead clients.
    pub claimed: u64,
}

impl Stat {
    /// Number of nodes in the tree.
    pub fn nodes(&self) -> u64 {
        self.leaves + self.inner
    }
}

/// A node without a separator: its level, its least key, and its place.
type Orphan = (u8, Vec<u8>, Far);

/// Result of a walk of the whole tree.
#[derive(Default)]
struct Walked {
    nodes: BTreeSet<Far>,
    orphans: Vec<Orphan>,
    stat: Stat,
}

impl<F: Fabric + Clock> Client<F> {
    /// Recovers dead clients, frees the memory that they have left behind, and inserts the separators that they have
    /// left out, while there is memory. Returns the number of separators and of units.
    ///
    /// # Errors
    /// [`IndexError`]; a part may be done.
    pub(super) async fn heal(&self, lane: &mut Lane) -> Result<(u64, u64), IndexError> {
        self.session.heal(lane.number).await?;
        let claimed = self.claimed().await?;
        let holders = self.session.holders().await?;
        let is_here = |nonce: u64| holders.iter().any(|(_, holder)| holder.nonce == nonce);
        self.session.grace(lane.number).await?;
        let walked = self.walk_all(lane.number).await?;
        let mut leaked: BTreeMap<u64, Vec<Far>> = BTreeMap::new();
        for (unit, nonce) in claimed {
            if !walked.nodes.contains(&unit) && !is_here(nonce) {
                leaked.entry(nonce).or_default().push(unit);
            }
        }
        let mut freed = 0;
        for (nonce, units) in leaked {
            freed += swap(&self.session, &units, nonce, 0).await?.len() as u64;
        }
        let mut inserted = 0;
        // From the top, so that each separator finds its node.
        for (level, separator, at) in walked.orphans {
            match self.insert_separator(lane, level + 1, separator, at).await {
                Ok(is_new) => inserted += u64::from(is_new),
                // Walks find the other nodes by their siblings.
                Err(IndexError::OutOfMemory) => break,
                Err(error) => return Err(error),
            }
        }
        Ok((inserted, freed))
    }

    /// Returns the shape of the tree. Reads the whole tree.
    ///
    /// # Errors
    /// [`IndexError`]; nothing was changed.
    pub(super) async fn stat(&self, lane: u16) -> Result<Stat, IndexError> {
        let mut stat = self.walk_all(lane).await?.stat;
        stat.claimed = self.claimed().await?.len() as u64;
        stat.locked = self.session.locks().await?.len() as u64;
        Ok(stat)
    }

    /// Reads the states of all units. Returns those that are claimed, with their states.
    async fn claimed(&self) -> Result<Vec<(Far, u64)>, IndexError> {
        let (layout, mut claimed) = (&self.session.layout, Vec::new());
        for (member, table) in layout.members.iter().enumerate() {
            let states = self.session.words(layout.state(member, 0), table.pieces).await?;
            let units = (0..).zip(states).filter(|(_, state)| *state != 0);
            claimed.extend(units.map(|(unit, state)| (layout.unit(member, unit), state)));
        }
        Ok(claimed)
    }

    /// Walks the whole tree, level by level.
    async fn walk_all(&self, lane: u16) -> Result<Walked, IndexError> {
        let mut walked = Walked::default();
        let mut own = Own { lane: Some(lane), ..Own::default() };
        let Some(Root { at, level }) = self.read_root(&mut own).await? else { return Ok(walked) };
        walked.stat.levels = u64::from(level) + 1;
        let (mut level, mut named) = (level, vec![(Vec::new(), at)]);
        loop {
            let below = self.walk_level(&mut own, level, &named, &mut walked).await?;
            if level == 0 {
                return Ok(walked);
            }
            (level, named) = (level - 1, below);
        }
    }

    /// Walks a level from left to right. `named` are the nodes that the level above names, in order. Returns those that
    /// this level names.
    async fn walk_level(
        &self,
        own: &mut Own,
        level: u8,
        named: &[(Vec<u8>, Far)],
        walked: &mut Walked,
    ) -> Result<Vec<(Vec<u8>, Far)>, IndexError> {
        let layout = &self.session.layout;
        let places: HashMap<Far, usize> =
            named.iter().enumerate().map(|(place, (_, at))| (*at, place)).collect();
        let (mut below, mut ahead) = (Vec::new(), HashMap::<Far, Image>::new());
        let mut at = named.first().ok_or(Damaged("a level without nodes"))?.1;
        loop {
            if !walked.nodes.insert(at) {
                return Err(Damaged("a node with two places").into());
            }
            let place = places.get(&at);
            if let Some(place) = place
                && !ahead.contains_key(&at)
            {
                let wave: Vec<Far> = named[*place..].iter().take(NODES_PER_WAVE).map(|(_, at)| *at).collect();
                let images = self.read_many(&wave, level).await?;
                ahead = wave.into_iter().zip(images).filter_map(|(at, image)| Some((at, image?))).collect();
            }
            match ahead.remove(&at) {
                Some(image) => own.image = image,
                None => self.read_whole(own, at, level).await?,
            }
            if place.is_none() {
                walked.orphans.push((level, own.image.low().to_vec(), at));
                walked.stat.orphans += 1;
            }
            match level {
                0 => self.count_leaf(own, at, &mut walked.stat).await?,
                _ => {
                    walked.stat.inner += 1;
                    walked.stat.records += own.image.count() as u64;
                    below.extend(own.image.children(layout)?);
                }
            }
            if own.image.high(&layout.form).is_none() {
                return Ok(below);
            }
            at = own.image.sibling(layout)?;
        }
    }

    async fn count_leaf(&self, own: &mut Own, at: Far, stat: &mut Stat) -> Result<(), IndexError> {
        let form = &self.session.layout.form;
        if !self.is_complete(&own.image)? {
            self.read_complete(own, at).await?;
        }
        stat.leaves += 1;
        for index in 0..form.span() {
            stat.keys += u64::from(own.image.entry(form, index)? != Entry::Empty);
        }
        Ok(())
    }
}
