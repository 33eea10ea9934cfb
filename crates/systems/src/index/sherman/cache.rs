//! The client's cache: copies of the nodes above the leaves, by the ranges of their keys.
//!
//! A copy may be outdated. The leaf that it names for a key may then have been split, so that the key is further right;
//! no leaf ever moves or loses its least key. An operation that finds its key outside of the leaf drops the copy and
//! begins anew at the root (paper, 4.2).
//!
//! If the copies exceed the budget, the less used one of two random copies is dropped (paper, 4.2).
//!
//! Differs from the paper: the top levels are not cached; the authors have removed that, too. The root's pointer is
//! known to the client, so a tree without inner nodes needs no copies.
//!
//! Invariant: a copy was read from the node, or written to it by this client, as a whole.

use super::layout::{Damaged, Far, Layout};
use super::mutants;
use super::node::Image;
use farside_remote::draws::Draws;
use std::collections::BTreeMap;
use std::ops::Bound;

/// Copies of nodes.
#[derive(Debug)]
pub(super) struct Cache {
    /// Largest size in bytes; if 0, nothing is cached.
    budget: usize,
    used: usize,
    copies: Vec<Cached>,
    /// Indices of the copies, by the least keys of their nodes.
    by_low: BTreeMap<Vec<u8>, usize>,
    draws: Draws,
    evicted: u64,
}

#[derive(Debug)]
struct Cached {
    low: Vec<u8>,
    high: Option<Vec<u8>>,
    /// Least keys of the children, and the children.
    children: Vec<(Vec<u8>, Far)>,
    uses: u64,
}

impl Cached {
    fn size(&self) -> usize {
        let keys: usize = self.children.iter().map(|(key, _)| key.capacity()).sum();
        size_of::<Cached>()
            + 2 * self.low.capacity()
            + self.high.as_ref().map_or(0, Vec::capacity)
            + keys
            + self.children.capacity() * size_of::<(Vec<u8>, Far)>()
            + 64
    }
}

impl Cache {
    pub(super) fn new(budget: usize) -> Cache {
        Cache {
            budget,
            used: 0,
            copies: Vec::new(),
            by_low: BTreeMap::new(),
            draws: Draws(budget as u64),
            evicted: 0,
        }
    }

    /// Number of copies that were dropped because of the budget.
    pub(super) fn evicted(&self) -> u64 {
        self.evicted
    }

    fn index(&self, key: &[u8]) -> Option<usize> {
        let (_, index) =
            self.by_low.range::<[u8], _>((Bound::Unbounded, Bound::Included(key))).next_back()?;
        self.copies[*index].high.as_deref().is_none_or(|high| key < high).then_some(*index)
    }

    /// Returns the leaves that the cache knows from this key on, at most `count`, from one copy.
    pub(super) fn find(&mut self, key: &[u8], count: usize) -> Option<impl Iterator<Item = Far> + '_> {
        let index = self.index(key)?;
        let copy = &mut self.copies[index];
        copy.uses += 1;
        let first = copy.children.partition_point(|(low, _)| low.as_slice() <= key).saturating_sub(1);
        Some(copy.children[first..].iter().take(count).map(|(_, at)| *at))
    }

    /// Drops the copy of the node that has this key.
    pub(super) fn invalidate(&mut self, key: &[u8]) {
        if let Some(index) = self.index(key).filter(|_| !mutants::INVALID_ENTRY_USED.is_on()) {
            self.remove(index);
        }
    }

    fn remove(&mut self, index: usize) {
        let copy = self.copies.swap_remove(index);
        self.used -= copy.size();
        self.by_low.remove(&copy.low);
        if let Some(moved) = self.copies.get(index) {
            *self.by_low.get_mut(&moved.low).expect("each copy is listed") = index;
        }
    }

    /// Caches a node of level 1.
    ///
    /// # Errors
    /// A pointer is damaged.
    pub(super) fn put(&mut self, layout: &Layout, image: &Image) -> Result<(), Damaged> {
        if self.budget == 0 {
            return Ok(());
        }
        if let Some(index) = self.by_low.get(image.low()).copied() {
            self.remove(index);
        }
        let children = image.children(layout)?;
        let (low, high) = (image.low().to_vec(), image.high(&layout.form).map(<[u8]>::to_vec));
        let copy = Cached { low, high, children, uses: 1 };
        if copy.size() > self.budget {
            return Ok(());
        }
        while self.used + copy.size() > self.budget {
            let mut pick = || self.draws.below(self.copies.len() as u64) as usize;
            let (one, other) = (pick(), pick());
            let index = if self.copies[one].uses <= self.copies[other].uses { one } else { other };
            self.remove(index);
            self.evicted += 1;
        }
        self.used += copy.size();
        self.by_low.insert(copy.low.clone(), self.copies.len());
        self.copies.push(copy);
        Ok(())
    }
}
