//! Values that prove themselves, and marks that tell whether a key went back.
//!
//! Invariant: two values of one key differ in every word of their filler, so that a mixture of them fails the
//! checksum wherever it is cut.
//! Invariant: sequences of a key begin at 1 and are never used twice; 0 means that nothing was written.
//! Invariant: a watermark never decreases.

use std::collections::HashMap;
use std::fmt;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};

use crc_fast::CrcAlgorithm;

/// value: | checksum u64, of the rest | key u64 | sequence u64 | writer u32 | filler |, little-endian
const KEY: usize = 8;
const SEQUENCE: usize = 16;
const WRITER: usize = 24;

/// Bytes that a value needs at least.
pub const VALUE_SIZE_MIN: usize = 28;

const _: () = assert!(VALUE_SIZE_MIN == WRITER + size_of::<u32>());

/// Who wrote a value, as its how-manieth of that key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// The writer.
    pub writer: u32,
    /// Counts the writer's values of this key, from 1.
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
    /// The value is whole, but by one who does not write this key.
    OtherWriter {
        /// The key that was read.
        key: u64,
        /// Who wrote the value.
        writer: u32,
        /// Who alone writes the key.
        owner: u32,
    },
    /// The value is older than one that had been read or acknowledged before this read began.
    WentBack {
        /// The key that was read.
        key: u64,
        /// The value that was read.
        read: Stamp,
        /// The sequence of the newer one, by the same writer.
        newest: u64,
    },
    /// There was no value, though one had been read or acknowledged before this read began.
    Missing {
        /// The key that was read.
        key: u64,
        /// The sequence of the value before.
        newest: u64,
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
    /// The key number is beyond the records that are watched.
    UnknownKey {
        /// The key.
        key: u64,
        /// Records that are watched.
        records: u64,
    },
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Torn { key } => write!(f, "key {key}: a torn value"),
            Self::OtherKey { key, found } => write!(f, "key {key}: the value of key {found}"),
            Self::OtherWriter { key, writer, owner } => {
                write!(f, "key {key}: a value by writer {writer}, but only {owner} writes it")
            }
            Self::WentBack { key, read: Stamp { writer, sequence }, newest } => {
                write!(f, "key {key} went back: {sequence} of writer {writer} after {newest}")
            }
            Self::Missing { key, newest } => write!(f, "key {key} went missing after {newest}"),
            Self::NeverWritten { key, read: Stamp { writer, sequence }, issued } => {
                write!(f, "key {key}: {sequence} of writer {writer}, who wrote {issued} so far")
            }
            Self::UnknownKey { key, records } => {
                write!(f, "key {key} is beyond the {records} that are watched")
            }
        }
    }
}

impl std::error::Error for Violation {}

/// What one reader has seen, where a key may have several writers: of values by different writers it cannot
/// tell which is newer, so it judges those of the same one.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    newest: HashMap<(u64, u32), u64>,
}

impl Seen {
    /// Judges what a read of `key` brought, and remembers it. The reader's reads of one key must follow one
    /// another.
    ///
    /// # Errors
    /// [`Violation::WentBack`].
    pub fn judge(&mut self, key: u64, read: Stamp) -> Result<(), Violation> {
        let newest = self.newest.entry((key, read.writer)).or_insert(read.sequence);
        if read.sequence < *newest {
            return Err(Violation::WentBack { key, read, newest: *newest });
        }
        *newest = read.sequence;
        Ok(())
    }
}

/// The newest value of each key that is known to be there, shared by all readers and writers.
///
/// It needs each key to have one writer, `key % writers`, which writes it one value at a time. Then any
/// decrease is a violation, whoever sees it: a read must bring at least what had been acknowledged or read
/// before it began.
///
/// A writer: [`issue`](Self::issue), write, and once that succeeded [`acknowledge`](Self::acknowledge). If it
/// is not known whether a write ran, and it may still run later, the key must not be written again.
/// A reader: [`newest`](Self::newest), read, [`judge`](Self::judge).
#[derive(Debug)]
pub struct Watermarks {
    marks: Box<[Mark]>,
    writers: NonZeroU32,
}

/// What is known of one key.
#[derive(Debug, Default)]
struct Mark {
    /// The last sequence handed to its writer.
    issued: AtomicU64,
    /// The newest sequence acknowledged or read.
    newest: AtomicU64,
}

impl Watermarks {
    /// For the keys below `records`, at 16 bytes each.
    pub fn new(records: u64, writers: NonZeroU32) -> Self {
        Self { marks: (0..records).map(|_| Mark::default()).collect(), writers }
    }

    /// Who writes `key`.
    pub fn writer_of(&self, key: u64) -> u32 {
        // A remainder is below its divisor, which is a u32.
        (key % u64::from(self.writers.get())) as u32
    }

    /// The key next to `drawn` that `writer` writes, so that a writer may follow a distribution; `None` if it
    /// writes none.
    pub fn owned_by(&self, writer: u32, drawn: u64) -> Option<u64> {
        let (records, writers) = (self.marks.len() as u64, u64::from(self.writers.get()));
        let drawn = drawn.min(records.checked_sub(1)?);
        let owned = drawn - drawn % writers + u64::from(writer);
        let owned = if owned < records { Some(owned) } else { owned.checked_sub(writers) };
        owned.filter(|&key| self.writer_of(key) == writer)
    }

    /// The sequence of the next value that its writer writes to `key`.
    ///
    /// # Errors
    /// [`Violation::UnknownKey`].
    pub fn issue(&self, key: u64) -> Result<u64, Violation> {
        // Relaxed: the store that carries the value orders it. The value is published after this, and whoever
        // asks in `judge` has read it.
        Ok(self.mark(key)?.issued.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Notes that value `sequence` of `key` is there: no read that begins from now on may bring an older one.
    ///
    /// # Errors
    /// [`Violation::UnknownKey`].
    pub fn acknowledge(&self, key: u64, sequence: u64) -> Result<(), Violation> {
        raise(&self.mark(key)?.newest, sequence);
        Ok(())
    }

    /// The newest value of `key` that is known to be there, 0 if none: to be asked before a read begins.
    ///
    /// # Errors
    /// [`Violation::UnknownKey`].
    pub fn newest(&self, key: u64) -> Result<u64, Violation> {
        // Acquire: pairs with the Release in `raise`, so that the read that follows finds the value in place.
        Ok(self.mark(key)?.newest.load(Ordering::Acquire))
    }

    /// Judges what a read of `key` brought, `None` for no value; `newest` is what [`newest`](Self::newest)
    /// said before the read began.
    ///
    /// # Errors
    /// Any violation.
    pub fn judge(&self, key: u64, newest: u64, value: Option<&[u8]>) -> Result<Option<Stamp>, Violation> {
        let mark = self.mark(key)?;
        let Some(value) = value else {
            return if newest == 0 { Ok(None) } else { Err(Violation::Missing { key, newest }) };
        };
        let read = check(key, value)?;
        let owner = self.writer_of(key);
        if read.writer != owner {
            return Err(Violation::OtherWriter { key, writer: read.writer, owner });
        }
        if read.sequence < newest {
            return Err(Violation::WentBack { key, read, newest });
        }
        // Relaxed: see `issue`.
        let issued = mark.issued.load(Ordering::Relaxed);
        if read.sequence > issued {
            return Err(Violation::NeverWritten { key, read, issued });
        }
        raise(&mark.newest, read.sequence);
        Ok(Some(read))
    }

    fn mark(&self, key: u64) -> Result<&Mark, Violation> {
        let records = self.marks.len() as u64;
        let mark = usize::try_from(key).ok().and_then(|index| self.marks.get(index));
        mark.ok_or(Violation::UnknownKey { key, records })
    }
}

/// Raises `watermark` to `sequence`, unless it is there already.
fn raise(watermark: &AtomicU64, sequence: u64) {
    // Most reads bring what is known: a load leaves the cache line shared. Acquire, so that whoever relies on
    // a mark that another thread raised has that thread's reason to raise it behind it.
    if watermark.load(Ordering::Acquire) < sequence {
        // Release: pairs with the Acquire in `newest`. The write or read that proved `sequence` comes before.
        watermark.fetch_max(sequence, Ordering::AcqRel);
    }
}

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
    use std::thread;

    use super::*;

    const SIZES: [usize; 6] = [VALUE_SIZE_MIN, 29, 36, 64, 512, 4096];

    fn value(key: u64, writer: u32, sequence: u64, size: usize) -> Vec<u8> {
        let mut value = vec![0xAA; size];
        encode(key, writer, sequence, &mut value).unwrap();
        value
    }

    fn watermarks(records: u64, writers: u32) -> Watermarks {
        Watermarks::new(records, NonZeroU32::new(writers).unwrap())
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

    #[test]
    fn a_reader_notices_that_a_writers_values_went_back() {
        let mut seen = Seen::default();
        let stamp = |writer, sequence| Stamp { writer, sequence };
        for (writer, sequence) in [(1, 5), (2, 3), (1, 5), (1, 9), (2, 4)] {
            assert_eq!(seen.judge(7, stamp(writer, sequence)), Ok(()));
        }
        assert_eq!(seen.judge(8, stamp(1, 1)), Ok(()), "another key");
        assert_eq!(
            seen.judge(7, stamp(1, 8)),
            Err(Violation::WentBack { key: 7, read: stamp(1, 8), newest: 9 })
        );
        assert_eq!(seen.judge(7, stamp(1, 9)), Ok(()), "a violation is not remembered");
    }

    #[test]
    fn a_read_may_not_bring_less_than_was_acknowledged_before_it_began() {
        let marks = watermarks(10, 4);
        let first = marks.issue(7).unwrap();
        marks.acknowledge(7, first).unwrap();
        let second = marks.issue(7).unwrap();
        assert_eq!((first, second), (1, 2));
        let (old, new) = (value(7, 3, first, 64), value(7, 3, second, 64));

        let began_before = marks.newest(7).unwrap();
        marks.acknowledge(7, second).unwrap();
        let began_after = marks.newest(7).unwrap();

        let read = Stamp { writer: 3, sequence: 1 };
        assert_eq!(marks.judge(7, began_before, Some(&old)), Ok(Some(read)), "it may overlap the write");
        assert_eq!(
            marks.judge(7, began_after, Some(&old)),
            Err(Violation::WentBack { key: 7, read, newest: 2 })
        );
        assert!(marks.judge(7, began_after, Some(&new)).is_ok());
    }

    #[test]
    fn once_anybody_read_a_value_nobody_may_read_an_older_one() {
        let marks = watermarks(10, 4);
        let old = value(7, 3, marks.issue(7).unwrap(), 64);
        let unacknowledged = value(7, 3, marks.issue(7).unwrap(), 64);
        assert!(marks.judge(7, marks.newest(7).unwrap(), Some(&unacknowledged)).is_ok());
        let later = marks.judge(7, marks.newest(7).unwrap(), Some(&old));
        assert!(matches!(later, Err(Violation::WentBack { key: 7, newest: 2, .. })), "{later:?}");
    }

    #[test]
    fn a_watermark_never_decreases() {
        let marks = watermarks(1, 1);
        for (sequence, newest) in [(3, 3), (1, 3), (4, 4), (4, 4)] {
            marks.acknowledge(0, sequence).unwrap();
            assert_eq!(marks.newest(0), Ok(newest));
        }
    }

    #[test]
    fn a_key_that_was_written_may_not_be_missing() {
        let marks = watermarks(10, 4);
        assert_eq!(marks.judge(7, marks.newest(7).unwrap(), None), Ok(None), "nothing was written yet");
        marks.acknowledge(7, marks.issue(7).unwrap()).unwrap();
        let missing = Violation::Missing { key: 7, newest: 1 };
        assert_eq!(marks.judge(7, marks.newest(7).unwrap(), None), Err(missing));
    }

    #[test]
    fn a_value_by_a_stranger_or_from_another_run_is_a_violation() {
        let marks = watermarks(10, 4);
        marks.issue(7).unwrap();
        let stranger = Violation::OtherWriter { key: 7, writer: 2, owner: 3 };
        assert_eq!(marks.judge(7, 0, Some(&value(7, 2, 1, 64))), Err(stranger));
        let read = Stamp { writer: 3, sequence: 2 };
        let leftover = Violation::NeverWritten { key: 7, read, issued: 1 };
        assert_eq!(marks.judge(7, 0, Some(&value(7, 3, 2, 64))), Err(leftover));
        assert_eq!(marks.judge(7, 0, Some(&[0; 64])), Err(Violation::Torn { key: 7 }));
    }

    #[test]
    fn a_key_beyond_the_records_is_a_violation_not_a_panic() {
        let marks = watermarks(10, 4);
        let unknown = Violation::UnknownKey { key: 10, records: 10 };
        assert_eq!(marks.issue(10), Err(unknown));
        assert_eq!(marks.acknowledge(10, 1), Err(unknown));
        assert_eq!(marks.newest(10), Err(unknown));
        assert_eq!(marks.judge(10, 0, None), Err(unknown));
    }

    #[test]
    fn every_writer_finds_a_key_of_its_own_near_the_one_drawn() {
        for (records, writers) in [(10, 4), (4, 4), (9, 1), (1000, 64), (3, 2)] {
            let marks = watermarks(records, writers);
            for (drawn, writer) in
                (0..records + 5).flat_map(|drawn| (0..writers).map(move |writer| (drawn, writer)))
            {
                let owned = marks.owned_by(writer, drawn).unwrap();
                assert!(owned < records && marks.writer_of(owned) == writer);
                assert!(owned.abs_diff(drawn.min(records - 1)) < u64::from(writers));
            }
        }
        assert_eq!(watermarks(2, 4).owned_by(3, 0), None);
        assert_eq!(watermarks(2, 4).owned_by(9, 0), None);
        assert_eq!(watermarks(0, 4).owned_by(0, 0), None);
    }

    #[test]
    fn an_atomic_store_has_no_violations_across_threads() {
        let (records, writers, rounds) = (8, 2, 2000);
        let marks = watermarks(records, writers);
        let store: Vec<std::sync::Mutex<Option<Vec<u8>>>> =
            (0..records).map(|_| Default::default()).collect();
        let (marks, store) = (&marks, &store);
        thread::scope(|scope| {
            for writer in 0..writers {
                scope.spawn(move || {
                    for round in 0..rounds {
                        let key = marks.owned_by(writer, round % records).unwrap();
                        let sequence = marks.issue(key).unwrap();
                        *store[key as usize].lock().unwrap() = Some(value(key, writer, sequence, 64));
                        marks.acknowledge(key, sequence).unwrap();
                    }
                });
                scope.spawn(move || {
                    for key in (0..rounds).map(|round| round % records) {
                        let newest = marks.newest(key).unwrap();
                        let read = store[key as usize].lock().unwrap().clone();
                        marks.judge(key, newest, read.as_deref()).unwrap();
                    }
                });
            }
        });
    }
}
