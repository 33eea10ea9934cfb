//! The keys of a trial of an index. They share prefixes of every length, and differ in every byte.
//!
//! Invariant: the keys are sorted, and no key occurs twice.
//! Invariant: the keys follow from the random draws alone.

use farside_sim::random::Random;
use farside_systems::index::{Keys, NUMBER_LEN, STRING_MAX};
use std::collections::BTreeSet;

/// One in this many sets of keys has many keys that differ in one byte only, so that a node needs as many slots.
const WIDE_ONE_IN: u64 = 2;
/// Bytes of which most parts of strings consist. The first and the last one are the smallest and the largest.
const LETTERS: [u8; 4] = [0x01, b'a', b'b', 0xff];
/// One in this many parts of strings is longer than a node's prefix, and one in this many of these is very long.
const LONG_ONE_IN: u64 = 4;

/// Draws this many keys.
pub fn drawn(random: &Random, kind: Keys, count: usize) -> Vec<Vec<u8>> {
    let wide = random.one_in(WIDE_ONE_IN);
    let mut keys: BTreeSet<Vec<u8>> = BTreeSet::new();
    let first = match kind {
        Keys::Numbers => random.bits().to_be_bytes().to_vec(),
        Keys::Strings => part(random),
    };
    let place = random.below(first.len() as u64) as usize;
    keys.insert(first.clone());
    // The ends of the range are keys like all others.
    for end in [smallest(kind), largest(kind)] {
        if keys.len() < count && random.one_in(2) {
            keys.insert(end);
        }
    }
    let mut attempts = 0;
    while keys.len() < count {
        attempts += 1;
        let is_wide = wide && attempts < 4 * 256 && !random.one_in(8);
        let other = || keys.iter().nth(random.below(keys.len() as u64) as usize).cloned().unwrap_or_default();
        let key = match kind {
            _ if is_wide => with_byte(first.clone(), place, random, kind),
            Keys::Numbers => {
                let mut key = other();
                let from = random.below(NUMBER_LEN as u64) as usize;
                key = with_byte(key, from, random, kind);
                if random.one_in(3) {
                    key[from + 1..].fill_with(|| random.bits() as u8);
                }
                key
            }
            // The other key may be a prefix of this one.
            Keys::Strings => {
                let mut key = other();
                key.truncate(random.below(key.len() as u64 + 1) as usize);
                key.extend(part(random));
                key.truncate(STRING_MAX);
                key
            }
        };
        keys.insert(key);
    }
    keys.into_iter().collect()
}

/// Returns the smallest key that is above `before`, or the smallest key at all; `None` if there is none.
pub fn after(kind: Keys, before: Option<&[u8]>) -> Option<Vec<u8>> {
    let Some(before) = before else { return Some(smallest(kind)) };
    if kind == Keys::Strings && before.len() < STRING_MAX {
        return Some([before, &[1]].concat());
    }
    // Keys of the longest length count like numbers, and strings are cut after the byte that is counted up.
    let counted = before.iter().rposition(|&byte| byte < u8::MAX)?;
    let mut next = before[..=counted].to_vec();
    next[counted] += 1;
    if kind == Keys::Numbers {
        next.resize(NUMBER_LEN, 0);
    }
    Some(next)
}

/// The smallest key.
fn smallest(kind: Keys) -> Vec<u8> {
    match kind {
        Keys::Numbers => vec![0; NUMBER_LEN],
        Keys::Strings => vec![1],
    }
}

/// The largest key.
fn largest(kind: Keys) -> Vec<u8> {
    match kind {
        Keys::Numbers => vec![u8::MAX; NUMBER_LEN],
        Keys::Strings => vec![u8::MAX; STRING_MAX],
    }
}

/// Draws another byte at this place of a key.
fn with_byte(mut key: Vec<u8>, place: usize, random: &Random, kind: Keys) -> Vec<u8> {
    key[place] = match kind {
        Keys::Numbers => random.bits() as u8,
        Keys::Strings => random.between(1, 255) as u8,
    };
    key
}

/// Draws a part of a string.
fn part(random: &Random) -> Vec<u8> {
    let len = match random.one_in(LONG_ONE_IN) {
        false => random.between(1, 4),
        true if random.one_in(LONG_ONE_IN) => random.between(30, STRING_MAX as u64),
        true => random.between(5, 20),
    };
    let letter = |_| match random.one_in(8) {
        true => random.between(1, 255) as u8,
        false => LETTERS[random.below(LETTERS.len() as u64) as usize],
    };
    (0..len).map(letter).collect()
}
