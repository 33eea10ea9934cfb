//! Values that prove themselves, and a [`Ledger`] that tells whether each key is one register.
//!
//! Invariant: two values of one key differ in every word of their filler, so that a mixture of them fails the
//! checksum wherever it is cut.
//! Invariant: sequences of a writer begin at 1 and are never used twice; 0 means that nothing was written.

mod ledger;

use std::fmt;

use crc_fast::CrcAlgorithm;

pub use ledger::{Begun, Ledger, Written};

/// value: | checksum u64, of the rest | key u64 | sequence u64 | writer u32 | filler |, little-endian
const KEY: usize = 8;
const SEQUENCE: usize = 16;
const WRITER: usize = 24;

/// Bytes that a value needs at least.
pub const VALUE_SIZE_MIN: usize = 28;

const _: () = assert!(VALUE_SIZE_MIN == WRITER + size_of::<u32>());

/// Who wrote a value, as its how-manieth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// The writer.
    pub writer: u32,
    /// Counts the writer's values, from 1.
    pub sequence: u64,
}

/// Fills `value` with the proof that `writer` wrote it to `key` as number `sequence`.
///
/// # Errors
/// `value` is shorter than [`VALUE_SIZE_MIN`].
pub fn encode(key: u64, writer: u32, sequence: u64, value: &mut [u8]) -> Result<(), TooSmall> {
    let size = value.len();
    let (header, filler) = value.split_at_mut_checked(VALUE_SIZE_MIN).ok_or(TooSmall { size })?;
    header[KEY..SEQUENCE].copy_from_slice(&key.to_le_bytes());
    header[SEQUENCE..WRITER].copy_from_slice(&sequence.to_le_bytes());
    header[WRITER..].copy_from_slice(&writer.to_le_bytes());
    fill(seed(key, writer, sequence), filler);
    let checksum = checksum(&value[KEY..]);
    value[..KEY].copy_from_slice(&checksum.to_le_bytes());
    Ok(())
}

/// What `value`, read from `key`, says of itself.
///
/// # Errors
/// [`Violation::Torn`] if it is no whole value, [`Violation::OtherKey`] if it is one of another key.
pub fn check(key: u64, value: &[u8]) -> Result<Stamp, Violation> {
    let header: &[u8; VALUE_SIZE_MIN] = value.first_chunk().ok_or(Violation::Torn { key })?;
    if u64_at(header, 0) != checksum(&value[KEY..]) {
        return Err(Violation::Torn { key });
    }
    let found = u64_at(header, KEY);
    if found != key {
        return Err(Violation::OtherKey { key, found });
    }
    let [.., a, b, c, d] = *header;
    Ok(Stamp { writer: u32::from_le_bytes([a, b, c, d]), sequence: u64_at(header, SEQUENCE) })
}

/// A value too short to prove itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooSmall {
    /// Its bytes.
    pub size: usize,
}

impl fmt::Display for TooSmall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "values of {} bytes cannot be verified: at least {VALUE_SIZE_MIN} are needed", self.size)
    }
}

impl std::error::Error for TooSmall {}

/// What nobody may ever read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Violation {
    /// The bytes are not those of one value: a mixture, cut short, or never written.
    Torn {
        /// The key that was read.
        key: u64,
    },
    /// The value is whole, but of another key.
    OtherKey {
        /// The key that was read.
        key: u64,
        /// The key that the value was written to.
        found: u64,
    },
    /// The value was replaced before this read began, or had not come when another was read.
    WentBack {
        /// The key that was read.
        key: u64,
        /// The value that was read.
        read: Stamp,
        /// One that came after it and was there before this read began; nothing if its write did not run.
        newer: Option<Stamp>,
    },
    /// There was no value, though there had been one before this read began.
    Missing {
        /// The key that was read.
        key: u64,
    },
    /// The value has a sequence that its writer never used: it is left over from before this run.
    NeverWritten {
        /// The key that was read.
        key: u64,
        /// The value that was read.
        read: Stamp,
        /// The last sequence used.
        issued: u64,
    },
    /// The value was read, though its write is said not to have run.
    NotRun {
        /// The key.
        key: u64,
        /// The value.
        read: Stamp,
    },
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Torn { key } => write!(f, "key {key}: a torn value"),
            Self::OtherKey { key, found } => write!(f, "key {key}: the value of key {found}"),
            Self::WentBack { key, read: Stamp { writer, sequence }, newer } => {
                write!(f, "key {key} went back: to value {sequence} of writer {writer}")?;
                match newer {
                    Some(Stamp { writer, sequence }) => write!(f, " after {sequence} of writer {writer}"),
                    None => f.write_str(", whose put is said not to have run"),
                }
            }
            Self::Missing { key } => write!(f, "key {key} went missing"),
            Self::NeverWritten { key, read: Stamp { writer, sequence }, issued } => {
                write!(f, "key {key}: value {sequence} of writer {writer}, who wrote {issued} so far")
            }
            Self::NotRun { key, read: Stamp { writer, sequence } } => {
                write!(f, "key {key}: value {sequence} of writer {writer} was read, and did not run")
            }
        }
    }
}

impl std::error::Error for Violation {}

/// Words that depend on `seed` and on their place.
fn fill(seed: u64, filler: &mut [u8]) {
    let mut word = seed;
    for chunk in filler.chunks_mut(size_of::<u64>()) {
        chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
        word = word.wrapping_add(0x9E37_79B9_7F4A_7C15);
    }
}

fn seed(key: u64, writer: u32, sequence: u64) -> u64 {
    let mix = |sum: u64, part: u64| (sum ^ part).wrapping_mul(0xD6E8_FEB8_6659_FD93).rotate_left(32);
    mix(mix(mix(0, key), writer.into()), sequence)
}

fn checksum(bytes: &[u8]) -> u64 {
    crc_fast::checksum(CrcAlgorithm::Crc64Nvme, bytes)
}

/// The eight bytes at `at`, which is a constant of this file and within the header.
fn u64_at(header: &[u8; VALUE_SIZE_MIN], at: usize) -> u64 {
    u64::from_le_bytes(header[at..at + 8].try_into().expect("8 bytes are 8 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: [usize; 6] = [VALUE_SIZE_MIN, 29, 36, 64, 512, 4096];

    fn value(key: u64, writer: u32, sequence: u64, size: usize) -> Vec<u8> {
        let mut value = vec![0xAA; size];
        encode(key, writer, sequence, &mut value).unwrap();
        value
    }

    #[test]
    fn a_value_says_who_wrote_it() {
        for size in SIZES {
            let read = check(7, &value(7, 3, 41, size)).unwrap();
            assert_eq!(read, Stamp { writer: 3, sequence: 41 });
        }
        let extreme = Stamp { writer: u32::MAX, sequence: u64::MAX };
        assert_eq!(check(u64::MAX, &value(u64::MAX, u32::MAX, u64::MAX, 28)), Ok(extreme));
    }

    #[test]
    fn a_value_too_small_is_refused_with_the_minimum() {
        for size in [0, 8, VALUE_SIZE_MIN - 1] {
            let error = encode(1, 1, 1, &mut vec![0; size]).unwrap_err();
            assert_eq!(error, TooSmall { size });
            assert!(error.to_string().ends_with("at least 28 are needed"));
        }
    }

    #[test]
    fn a_value_torn_anywhere_is_a_violation() {
        let (old, new) = (value(7, 3, 41, 512), value(7, 3, 42, 512));
        for cut in (8..512).step_by(8) {
            let front_new = [&new[..cut], &old[cut..]].concat();
            let front_old = [&old[..cut], &new[cut..]].concat();
            for torn in [front_new, front_old] {
                assert_eq!(check(7, &torn), Err(Violation::Torn { key: 7 }), "cut at {cut}");
            }
        }
        for line in 0..8 {
            let mut torn = old.clone();
            torn[line * 64..(line + 1) * 64].copy_from_slice(&new[line * 64..(line + 1) * 64]);
            assert_eq!(check(7, &torn), Err(Violation::Torn { key: 7 }), "line {line}");
        }
    }

    #[test]
    fn bytes_that_are_no_value_are_a_violation() {
        let whole = value(7, 3, 41, 512);
        for bytes in [&[][..], &[0; 27], &[0; 28], &[0; 512], &whole[..511], &whole[..28]] {
            assert_eq!(check(7, bytes), Err(Violation::Torn { key: 7 }));
        }
        for bit in 0..whole.len() * 8 {
            let mut flipped = whole.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(check(7, &flipped), Err(Violation::Torn { key: 7 }), "bit {bit}");
        }
    }

    #[test]
    fn another_keys_value_is_a_violation() {
        assert_eq!(check(8, &value(7, 3, 41, 64)), Err(Violation::OtherKey { key: 8, found: 7 }));
    }
}
