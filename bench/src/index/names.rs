//! Keys of the records of an index.
//!
//! Invariant: two records have different keys.
//! Invariant: if the keys are ordered, they sort like the numbers of their records.

use farside_systems::index::{Keys, NUMBER_LEN};

/// Kind of the keys of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameKind {
    /// Numbers of 8 bytes.
    Numbers,
    /// Strings like the addresses of a mail service, with the host reversed and first: `com.kobomaru.mail@tapi`.
    Emails,
}

impl NameKind {
    /// Name of the kind in reports.
    pub const fn name(self) -> &'static str {
        match self {
            NameKind::Numbers => "numbers",
            NameKind::Emails => "emails",
        }
    }

    /// Kind of the store's keys.
    pub const fn keys(self) -> Keys {
        match self {
            NameKind::Numbers => Keys::Numbers,
            NameKind::Emails => Keys::Strings,
        }
    }

    /// Length of the longest key in bytes.
    pub const fn len_max(self) -> usize {
        match self {
            NameKind::Numbers => NUMBER_LEN,
            NameKind::Emails => EMAIL_LEN,
        }
    }
}

/// Keys of the records of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Names {
    /// Kind of the keys.
    pub kind: NameKind,
    /// Whether keys sort like the numbers of their records. Otherwise, they are scattered.
    pub is_ordered: bool,
}

const TOP: &[u8] = b"com.";
const SERVICE: &[u8] = b".mail@";
/// Number of syllables of a host, and of a user.
const HOST: usize = 4;
const USER: usize = 2;
/// Bits of a syllable's number. A syllable is a consonant and a vowel.
const SYLLABLE_BITS: u32 = 6;
const HOST_BITS: u32 = SYLLABLE_BITS * HOST as u32;
const USER_BITS: u32 = SYLLABLE_BITS * USER as u32;
/// Length of an address in bytes.
const EMAIL_LEN: usize = TOP.len() + 2 * HOST + SERVICE.len() + 2 * USER;
/// Letters, in the order of the alphabet.
const CONSONANTS: &[u8; 13] = b"bdfghklmnprst";
const VOWELS: &[u8; 5] = b"aeiou";

const _: () = assert!(EMAIL_LEN <= 32);
const _: () = assert!(CONSONANTS.len() * VOWELS.len() >= 1 << SYLLABLE_BITS);

impl Names {
    /// Writes the key of a record.
    #[inline]
    pub fn write(self, record: u64, key: &mut Vec<u8>) {
        key.clear();
        match self.kind {
            NameKind::Numbers => {
                let number = if self.is_ordered { record } else { scattered(record) };
                key.extend_from_slice(&number.to_be_bytes());
            }
            NameKind::Emails => {
                let (mut host, mut user) = (record >> USER_BITS, record & ((1 << USER_BITS) - 1));
                if !self.is_ordered {
                    // Products with odd numbers, so that no two numbers of as many bits have the same.
                    host = host.wrapping_mul(0x9e_3779) & ((1 << HOST_BITS) - 1);
                    user = user.wrapping_mul(0x5a5) & ((1 << USER_BITS) - 1);
                }
                key.extend_from_slice(TOP);
                syllables(host, HOST, key);
                key.extend_from_slice(SERVICE);
                syllables(user, USER, key);
            }
        }
    }

    /// Returns the number of the record with this key; `None` if no record has it, or the keys are scattered.
    pub fn record(self, key: &[u8]) -> Option<u64> {
        if !self.is_ordered {
            return None;
        }
        match self.kind {
            NameKind::Numbers => key.try_into().ok().map(u64::from_be_bytes),
            NameKind::Emails => {
                let (host, user) = key.strip_prefix(TOP)?.split_at_checked(2 * HOST)?;
                Some(number(host, HOST)? << USER_BITS | number(user.strip_prefix(SERVICE)?, USER)?)
            }
        }
    }
}

/// A permutation of numbers without visible order: the last step of the generator SplitMix64.
const fn scattered(number: u64) -> u64 {
    let number = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ number >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ number >> 31
}

/// Writes a number as syllables, the highest bits first.
fn syllables(number: u64, count: usize, out: &mut Vec<u8>) {
    for place in (0..count as u32).rev() {
        let syllable = (number >> (place * SYLLABLE_BITS)) as usize & ((1 << SYLLABLE_BITS) - 1);
        out.extend_from_slice(&[CONSONANTS[syllable / VOWELS.len()], VOWELS[syllable % VOWELS.len()]]);
    }
}

/// Returns the number that [`syllables`] writes as this text.
fn number(text: &[u8], count: usize) -> Option<u64> {
    if text.len() != 2 * count {
        return None;
    }
    let place = |letters: &[u8], letter: u8| letters.iter().position(|&other| other == letter);
    text.chunks_exact(2).try_fold(0, |number, letters| {
        let syllable = place(CONSONANTS, letters[0])? * VOWELS.len() + place(VOWELS, letters[1])?;
        (syllable < 1 << SYLLABLE_BITS).then_some(number << SYLLABLE_BITS | syllable as u64)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn key(names: Names, record: u64) -> Vec<u8> {
        let mut key = Vec::new();
        names.write(record, &mut key);
        key
    }

    #[test]
    fn ordered_keys_sort_like_their_records_and_name_them() {
        for kind in [NameKind::Numbers, NameKind::Emails] {
            let names = Names { kind, is_ordered: true };
            let records: Vec<u64> = (0..20_000).chain((1 << 30) - 9..(1 << 30) + 9).collect();
            for pair in records.windows(2) {
                assert!(key(names, pair[0]) < key(names, pair[1]), "{kind:?} {pair:?}");
            }
            for record in records {
                let key = key(names, record);
                assert_eq!((names.record(&key), key.len()), (Some(record), kind.len_max()));
                kind.keys().check(&key).expect("an index has such keys");
            }
            assert_eq!(names.record(b"com.kobomaru.mail@tap"), None);
        }
        assert_eq!(key(Names { kind: NameKind::Emails, is_ordered: true }, 4097), b"com.babababe.mail@babe");
    }

    #[test]
    fn scattered_keys_differ_and_are_in_no_order() {
        for kind in [NameKind::Numbers, NameKind::Emails] {
            let names = Names { kind, is_ordered: false };
            let keys: Vec<Vec<u8>> = (0..50_000).map(|record| key(names, record)).collect();
            assert_eq!(keys.iter().collect::<BTreeSet<_>>().len(), keys.len());
            let ascending = keys.windows(2).filter(|pair| pair[0] < pair[1]).count();
            assert!((keys.len() / 4..keys.len() * 3 / 4).contains(&ascending), "{kind:?}: {ascending}");
        }
    }
}
