//! Code that this crate's tests share: a plain memory with a small node in it.
//!
//! Invariant: [`Bytes`] completes each access at once, and asserts that the access is in bounds and aligned. So every
//! test also shows that runners make no out-of-bounds or misaligned access.

#![allow(dead_code, reason = "each test file uses a part of this")]

pub(crate) mod cases;
pub(crate) mod lists;
pub(crate) mod model;
pub(crate) mod tearing;

use farside_remote::arena::class::Class;
use farside_remote::arena::lists::Supply;
use farside_remote::arena::segment::Use;
use farside_remote::arena::{Arena, Geometry};
use farside_remote::{Key, Memory, Rights, Width};
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::{Mutex, MutexGuard};

/// Size of a page, the unit in which changes are recorded, in bytes.
pub(crate) const PAGE: u64 = 4096;

/// Minimum allocation of a memory in bytes. The C library maps allocations of this size, so that pages which are never
/// touched take no time to zero.
const MAPPED: usize = 33 << 20;

/// Plain memory in which every access completes at once.
pub(crate) struct Bytes {
    geometry: Geometry,
    inner: Mutex<Inner>,
}

struct Inner {
    bytes: Vec<u8>,
    touched: BTreeSet<u64>,
    /// The contents of the pages that were written while the memory is watched, from before that.
    former: Option<BTreeMap<u64, Vec<u8>>>,
    /// Number of words that may still be loaded before a load panics.
    words_left: u64,
    /// Rights that the keys of the regions grant.
    rights: Rights,
    wide: bool,
}

impl Bytes {
    /// Creates a memory of `size` zeros.
    pub(crate) fn new(size: u64) -> Bytes {
        let geometry = Geometry::of(size).expect("a legal size");
        let size = usize::try_from(size).expect("it fits the address space");
        let mut bytes = vec![0; MAPPED.max(size)];
        bytes.truncate(size);
        let (touched, words_left) = (BTreeSet::new(), u64::MAX);
        let inner = Inner { bytes, touched, former: None, words_left, rights: Rights::ALL, wide: true };
        Bytes { geometry, inner: Mutex::new(inner) }
    }

    pub(crate) fn peek(&self, at: u64, len: u64) -> Vec<u8> {
        self.inner().bytes[range(at, len)].to_vec()
    }

    pub(crate) fn poke(&self, at: u64, bytes: &[u8]) {
        let mut inner = self.inner();
        let pages = at / PAGE..=(at + (bytes.len() as u64).max(1) - 1) / PAGE;
        let Inner { bytes: all, former, .. } = &mut *inner;
        if let Some(former) = former {
            for page in pages.clone() {
                former.entry(page).or_insert_with(|| all[range(page * PAGE, PAGE)].to_vec());
            }
        }
        all[range(at, bytes.len() as u64)].copy_from_slice(bytes);
        inner.touched.extend(pages);
    }

    /// Panics when more than `words` words are loaded from now on, so that an endless loop fails.
    pub(crate) fn limit_words(&self, words: u64) {
        self.inner().words_left = words;
    }

    /// Gives the regions' keys exactly these rights from now on.
    pub(crate) fn limit_rights(&self, rights: Rights) {
        self.inner().rights = rights;
    }

    /// Sets whether words of 24 and 32 bytes can be exchanged from now on.
    pub(crate) fn set_wide(&self, wide: bool) {
        self.inner().wide = wide;
    }

    pub(crate) fn all(&self) -> Vec<u8> {
        self.inner().bytes.clone()
    }

    /// Begins to watch for changes.
    pub(crate) fn watch(&self) {
        self.inner().former = Some(BTreeMap::new());
    }

    /// Whether any byte has another value than at the last call of [`Bytes::watch`].
    pub(crate) fn has_changed(&self) -> bool {
        let inner = self.inner();
        let former = inner.former.as_ref().expect("the memory is watched");
        former.iter().any(|(page, former)| inner.bytes[range(page * PAGE, PAGE)] != former[..])
    }

    /// The numbers of the pages that were written since the last call.
    pub(crate) fn take_touched(&self) -> BTreeSet<u64> {
        std::mem::take(&mut self.inner().touched)
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

fn range(at: u64, len: u64) -> std::ops::Range<usize> {
    at as usize..(at + len) as usize
}

fn word(bytes: &[u8]) -> u128 {
    let mut word = [0; 16];
    word[..bytes.len()].copy_from_slice(bytes);
    u128::from_le_bytes(word)
}

impl Memory for Bytes {
    type Wait = Infallible;

    fn geometry(&self) -> Geometry {
        self.geometry
    }
    fn admits(&self, key: Key) -> Result<Rights, Infallible> {
        let Ok(rights) = Arena::of(self).admits(key);
        Ok(rights.and(self.inner().rights))
    }
    fn reach(&self, region: u32, at: u64, len: u64) -> Result<u64, Infallible> {
        Arena::of(self).reach(region, at, len)
    }
    fn read(&self, at: u64, out: &mut [u8]) -> Result<(), Infallible> {
        out.copy_from_slice(&self.inner().bytes[range(at, out.len() as u64)]);
        Ok(())
    }
    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Infallible> {
        self.poke(at, bytes);
        Ok(())
    }
    fn load(&self, at: u64, width: Width) -> Result<u128, Infallible> {
        assert!(at.is_multiple_of(width.bytes()), "a misaligned word was loaded");
        let mut inner = self.inner();
        inner.words_left = inner.words_left.checked_sub(1).expect("an endless loop");
        Ok(word(&inner.bytes[range(at, width.bytes())]))
    }
    fn exchange(&self, at: u64, width: Width, old: u128, new: u128) -> Result<Result<(), u128>, Infallible> {
        let Ok(now) = self.load(at, width);
        if now != old {
            return Ok(Err(now));
        }
        self.poke(at, &new.to_le_bytes()[..width.bytes() as usize]);
        Ok(Ok(()))
    }
    fn is_wide(&self) -> bool {
        self.inner().wide
    }
    fn exchange_wide(&self, at: u64, old: &mut [u8], new: &[u8]) -> Result<bool, Infallible> {
        assert!(self.is_wide() && at.is_multiple_of(32), "a wide word was exchanged where there are none");
        assert!(old.len() == new.len() && matches!(new.len(), 24 | 32));
        let now = self.peek(at, old.len() as u64);
        let swapped = now == old;
        if swapped {
            self.poke(at, new);
        }
        old.copy_from_slice(&now);
        Ok(swapped)
    }
}

/// The secret of the key of a test's region.
pub(crate) const fn secret(region: u32) -> u64 {
    0x5ec2_e700_0000_0000 + region as u64
}

/// Returns the key of a test's region.
pub(crate) const fn key(region: u32) -> Key {
    Key::new(region, secret(region))
}

/// Opens a region as the node does: sets the secret of its key.
pub(crate) fn open(memory: &Bytes, region: u32) {
    let Ok(()) = Arena::of(memory).set_secret(region, secret(region));
}

/// Revokes the region's key: it admits no chain that starts from now on.
pub(crate) fn revoke(memory: &Bytes, region: u32) {
    let Ok(()) = Arena::of(memory).set_secret(region, 0);
}

pub(crate) fn assign(memory: &Bytes, index: u32, region: u32, usage: Use) {
    let arena = Arena::of(memory);
    let Ok(old) = arena.segment(index);
    let Ok(true) = arena.assign(index, old, region, usage) else {
        panic!("no other process assigns segments")
    };
}

pub(crate) fn grant(memory: &Bytes, index: u32, region: u32, supply: Supply) {
    assign(memory, index, region, Use::Granted);
    let Ok(()) = Arena::of(memory).grant(region, supply, index);
}

/// Takes a buffer, which must be available.
pub(crate) fn take(memory: &Bytes, region: u32, class: &'static Class, supply: Supply, owner: u32) -> u64 {
    let Ok(taken) = Arena::of(memory).take(region, class, supply, owner);
    taken.expect("there is a buffer")
}

pub(crate) fn give(memory: &Bytes, at: u64) {
    let arena = Arena::of(memory);
    let Ok(Some((region, buffer))) = arena.buffer_at(at) else { panic!("{at:#x} is no buffer") };
    let Ok(()) = arena.give(region, &buffer);
}

/// The buffers on a class's free list, first to last. The list must be settled.
pub(crate) fn free_list<M: Memory<Wait = Infallible>>(
    memory: &M,
    region: u32,
    class: &'static Class,
) -> Vec<u64> {
    let arena = Arena::of(memory);
    let mut list = Vec::new();
    let Ok(mut next) = arena.first_free(region, class);
    while let Some(buffer) = next {
        list.push(buffer.at);
        assert!(list.len() <= 1 << 20, "a free list has a cycle");
        let Ok(state) = arena.state(&buffer);
        let Ok(found) = arena.buffer_at(state.next);
        assert_eq!(found.is_none(), state.next == 0, "a link points to no buffer");
        next = found.map(|(_, buffer)| buffer);
    }
    list
}
