//! The bytes of a log's files, and the reader that tells a torn tail from a damaged file.
//!
//! A file is a start, a head, and records. The head and every record is a frame:
//!
//! ```text
//! start | magic u64 | salt u64 |
//! frame | length u32 | sequence u64 | durable u64 | CRC u64 | bytes |
//! ```
//!
//! * The *salt* is random. The CRC-64/NVME covers it, and everything in the frame but itself. So a frame of a deleted
//!   file that a file system shows after a crash is not taken for a frame of this file.
//! * The *sequence* of the head is 0, that of the first record is in the head, and each next record's is one higher.
//! * *Durable* is the highest sequence of which the writer knew, when it wrote the frame, that no crash could lose it.
//!
//! A frame whose CRC is wrong ends the file if no later frame proves that it was durable: a crash has torn the tail.
//! Records behind it may have reached the disk before it, but none of them was acknowledged as durable. If a later
//! frame proves that the record was durable, the file was damaged.

use super::mutants;
use farside_remote::control::Store;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::io;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Maximum size of a record in bytes.
pub const RECORD_MAX: usize = 4 << 20;

const MAGIC: u64 = u64::from_le_bytes(*b"FARLOG01");

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Start {
    magic: U64,
    salt: U64,
}

const START_SIZE: usize = size_of::<Start>();

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct FrameHeader {
    len: U32,
    sequence: U64,
    durable: U64,
    crc: U64,
}

const FRAME_SIZE: usize = size_of::<FrameHeader>();

/// The part that a file plays in its log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// Records in the order in which they were appended.
    Log,
    /// Records that recreate what the logs of earlier generations contained. It ends with an empty record.
    Checkpoint,
}

/// The first frame of a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Head<'a> {
    /// The file's part.
    pub part: Part,
    /// Number of the file's generation: a checkpoint replaces all logs of lower generations.
    pub generation: u64,
    /// Sequence of the first record.
    pub first: u64,
    /// The store whose log it is, as the node created it.
    pub store: Cow<'a, Store>,
}

/// A decoded frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// The frame's number in its log.
    pub sequence: u64,
    /// The highest sequence that was durable when the frame was written.
    pub durable: u64,
    /// The record, or the head.
    pub bytes: &'a [u8],
}

/// Encodes the beginning of a file: its start and its head.
pub fn put_head(out: &mut Vec<u8>, salt: u64, head: &Head<'_>) {
    out.extend_from_slice(Start { magic: U64::new(MAGIC), salt: U64::new(salt) }.as_bytes());
    put_frame(out, salt, 0, 0, &serde_json::to_vec(head).expect("plain data"));
}

/// Encodes a frame.
///
/// # Panics
/// The record is longer than [`RECORD_MAX`].
pub fn put_frame(out: &mut Vec<u8>, salt: u64, sequence: u64, durable: u64, bytes: &[u8]) {
    assert!(bytes.len() <= RECORD_MAX, "a record of {} bytes is too long for a log", bytes.len());
    let mut header = FrameHeader {
        len: (bytes.len() as u32).into(),
        sequence: sequence.into(),
        durable: durable.into(),
        crc: U64::ZERO,
    };
    header.crc = crc(salt, &header, bytes).into();
    out.extend_from_slice(header.as_bytes());
    out.extend_from_slice(bytes);
}

/// Size of a record of `len` bytes in a file.
pub const fn frame_size(len: usize) -> usize {
    FRAME_SIZE + len
}

fn crc(salt: u64, header: &FrameHeader, bytes: &[u8]) -> u64 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme);
    digest.update(&salt.to_le_bytes());
    digest.update(&header.as_bytes()[..FRAME_SIZE - size_of::<U64>()]);
    digest.update(bytes);
    digest.finalize()
}

/// Decodes the frame at the start of `bytes`. Returns the frame and its size, or `None` if no valid frame is there.
pub fn take_frame(bytes: &[u8], salt: u64) -> Option<(Frame<'_>, usize)> {
    let (header, rest) = FrameHeader::read_from_prefix(bytes).ok()?;
    let len = header.len.get() as usize;
    if len > RECORD_MAX {
        return None;
    }
    let body = rest.get(..len)?;
    let is_valid = crc(salt, &header, body) == header.crc.get() || mutants::LOG_TAKES_TORN_RECORDS.is_on();
    let frame = Frame { sequence: header.sequence.get(), durable: header.durable.get(), bytes: body };
    is_valid.then_some((frame, frame_size(len)))
}

/// A file that can be read.
pub trait Source {
    /// Reads bytes at a position. Returns fewer bytes only at the end of the file.
    ///
    /// # Errors
    /// The system refused the access.
    fn read_at(&self, at: u64, out: &mut [u8]) -> io::Result<usize>;
}

/// The end of a file's valid records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The last frame is complete.
    Clean,
    /// The file has more bytes, in which no frame was durable.
    Torn {
        /// Number of bytes behind the last valid frame.
        lost: u64,
    },
    /// A record behind the last valid one was durable, and is damaged.
    Damaged {
        /// Sequence of the damaged record.
        sequence: u64,
    },
}

/// What a file contains besides its records.
#[derive(Clone, Debug, PartialEq)]
pub struct Contents {
    /// The file's head.
    pub head: Head<'static>,
    /// The salt of the file's frames.
    pub salt: u64,
    /// Size of the valid part in bytes.
    pub len: u64,
    /// Sequence of the record that would come next.
    pub next: u64,
    /// Whether the last record was empty, which ends a checkpoint.
    pub is_ended: bool,
    /// The end of the valid part.
    pub end: End,
}

/// Number of bytes that are read at once.
const WINDOW: usize = 1 << 20;

/// Reads a file from its beginning, and passes every valid record to `each`. Returns `None` if the file has no valid
/// head.
///
/// # Errors
/// The system refused an access, or `each` failed.
pub fn read<E: From<io::Error>>(
    source: &dyn Source,
    mut each: impl FnMut(u64, &[u8]) -> Result<(), E>,
) -> Result<Option<Contents>, E> {
    let mut window = Window { source, at: 0, bytes: Vec::new(), skipped: 0, is_end: false };
    let Some((head, salt)) = head_of(&mut window)? else { return Ok(None) };
    let (mut next, mut is_ended) = (head.first, false);
    let end = loop {
        window.fill_frame()?;
        if window.bytes().is_empty() {
            break End::Clean;
        }
        let taken = take_frame(window.bytes(), salt).filter(|(frame, _)| frame.sequence == next);
        let Some((frame, size)) = taken else {
            window.fill(usize::MAX)?;
            break end_of(window.bytes(), salt, next);
        };
        is_ended = frame.bytes.is_empty();
        if !is_ended {
            each(next, frame.bytes)?;
        }
        next += 1;
        window.skip(size);
    };
    Ok(Some(Contents { head, salt, len: window.at, next, is_ended, end }))
}

/// Reads a file's head alone, as if the file had no records. Returns `None` if the file has no valid head.
///
/// # Errors
/// The system refused an access.
pub fn read_head<E: From<io::Error>>(source: &dyn Source) -> Result<Option<Contents>, E> {
    let mut window = Window { source, at: 0, bytes: Vec::new(), skipped: 0, is_end: false };
    let read = head_of(&mut window)?;
    Ok(read.map(|(head, salt)| {
        let next = head.first;
        Contents { head, salt, len: window.at, next, is_ended: false, end: End::Clean }
    }))
}

/// Reads a file's start and head, and returns the head and the salt.
fn head_of(window: &mut Window<'_>) -> io::Result<Option<(Head<'static>, u64)>> {
    window.fill(START_SIZE)?;
    let start = Start::read_from_prefix(window.bytes()).ok().map(|(start, _)| start);
    let Some(start) = start.filter(|start| start.magic.get() == MAGIC) else { return Ok(None) };
    let salt = start.salt.get();
    window.skip(START_SIZE);
    window.fill_frame()?;
    let head = take_frame(window.bytes(), salt).filter(|(frame, _)| frame.sequence == 0);
    let Some((frame, size)) = head else { return Ok(None) };
    let Ok(head) = serde_json::from_slice::<Head<'static>>(frame.bytes) else { return Ok(None) };
    window.skip(size);
    Ok(Some((head, salt)))
}

/// Judges the bytes behind the last valid frame, where the frame with the sequence `next` should be.
fn end_of(bytes: &[u8], salt: u64, next: u64) -> End {
    // The bytes between cannot have more frames than this.
    let most = (bytes.len() / FRAME_SIZE) as u64;
    for at in 0..bytes.len().saturating_sub(FRAME_SIZE) {
        let Ok((header, _)) = FrameHeader::read_from_prefix(&bytes[at..]) else { break };
        let sequence = header.sequence.get();
        let is_later = sequence > next && sequence - next <= most && header.durable.get() < sequence;
        let is_proof = is_later && !mutants::LOG_CUTS_DAMAGED_RECORDS.is_on();
        if is_proof && header.durable.get() >= next && take_frame(&bytes[at..], salt).is_some() {
            return End::Damaged { sequence: next };
        }
    }
    End::Torn { lost: bytes.len() as u64 }
}

/// The part of a file that is in memory.
struct Window<'a> {
    source: &'a dyn Source,
    /// Position in the file of the first byte that was not skipped.
    at: u64,
    bytes: Vec<u8>,
    /// Number of bytes at the start of `bytes` that were skipped.
    skipped: usize,
    is_end: bool,
}

impl Window<'_> {
    /// The bytes that were read and not skipped.
    fn bytes(&self) -> &[u8] {
        &self.bytes[self.skipped..]
    }

    /// Reads until the window has `len` bytes, or the file ends.
    fn fill(&mut self, len: usize) -> io::Result<()> {
        while self.bytes().len() < len && !self.is_end {
            self.bytes.drain(..std::mem::take(&mut self.skipped));
            let have = self.bytes.len();
            self.bytes.resize(have + WINDOW, 0);
            let read = self.source.read_at(self.at + have as u64, &mut self.bytes[have..])?;
            self.bytes.truncate(have + read);
            self.is_end = read < WINDOW;
        }
        Ok(())
    }

    /// Reads until the window has the whole frame at its start, if there is one.
    fn fill_frame(&mut self) -> io::Result<()> {
        self.fill(FRAME_SIZE)?;
        if let Ok((header, _)) = FrameHeader::read_from_prefix(self.bytes()) {
            self.fill(frame_size((header.len.get() as usize).min(RECORD_MAX)))?;
        }
        Ok(())
    }

    fn skip(&mut self, len: usize) {
        self.skipped += len;
        self.at += len as u64;
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::log::folder_of;

    const SALT: u64 = 0x5eed;

    pub(crate) fn store() -> Store {
        Store {
            name: "s".into(),
            kind: "k".into(),
            parameters: "{\"slots\":4}".into(),
            quota: 4 << 20,
            incarnation: 7,
            region: 1,
            secret: 0,
            table_at: 0,
            table_len: 1 << 20,
            wide: false,
            created: 0,
            id: 0xab,
            former: None,
            membership: None,
        }
    }

    struct Bytes(Vec<u8>);

    impl Source for Bytes {
        fn read_at(&self, at: u64, out: &mut [u8]) -> io::Result<usize> {
            let rest = self.0.get(at as usize..).unwrap_or_default();
            let len = rest.len().min(out.len());
            out[..len].copy_from_slice(&rest[..len]);
            Ok(len)
        }
    }

    type Read = Option<(Contents, Vec<Vec<u8>>)>;

    fn read_all(bytes: &[u8]) -> Read {
        let mut records = Vec::new();
        let contents = read(&Bytes(bytes.to_vec()), |_, record| {
            records.push(record.to_vec());
            Ok::<_, io::Error>(())
        });
        contents.expect("memory has no errors").map(|contents| (contents, records))
    }

    /// A file with four records, written in two batches. Returns also the position of each record and of the end.
    fn file() -> (Vec<u8>, Vec<usize>) {
        let (mut bytes, mut places) = (Vec::new(), Vec::new());
        let head = Head { part: Part::Log, generation: 3, first: 5, store: Cow::Owned(store()) };
        put_head(&mut bytes, SALT, &head);
        for (sequence, durable) in [(5, 4), (6, 4), (7, 6), (8, 6)] {
            places.push(bytes.len());
            put_frame(&mut bytes, SALT, sequence, durable, &vec![sequence as u8; 3 * sequence as usize]);
        }
        places.push(bytes.len());
        (bytes, places)
    }

    #[test]
    fn a_file_reads_back_as_it_was_written() {
        let (bytes, _) = file();
        let (contents, records) = read_all(&bytes).expect("a valid file");
        assert_eq!(records, [5u8, 6, 7, 8].map(|byte| vec![byte; 3 * usize::from(byte)]));
        let Contents { head, salt, len, next, is_ended, end } = contents;
        assert_eq!((salt, len, next, is_ended, end), (SALT, bytes.len() as u64, 9, false, End::Clean));
        assert_eq!((head.part, head.generation, head.first), (Part::Log, 3, 5));
        assert_eq!((folder_of(&head.store).as_str(), &*head.store), ("s.00000000000000ab", &store()));
    }

    #[test]
    fn a_file_cut_at_any_byte_keeps_its_whole_records() {
        let (bytes, places) = file();
        for len in 0..bytes.len() {
            let read = read_all(&bytes[..len]);
            let whole = places.iter().filter(|&&place| place <= len).count();
            if whole == 0 {
                assert_eq!(read, None, "{len} bytes have no head");
                continue;
            }
            let (contents, records) = read.expect("the head is whole");
            let place = places[whole - 1];
            assert_eq!((records.len(), contents.len), (whole - 1, place as u64), "{len} bytes");
            let lost = (len - place) as u64;
            assert_eq!(contents.end, if lost == 0 { End::Clean } else { End::Torn { lost } }, "{len} bytes");
        }
    }

    #[test]
    fn any_flipped_bit_is_found_and_is_damage_if_a_later_record_proves_it() {
        let (bytes, places) = file();
        for bit in places[0] * 8..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            let record = places.iter().rposition(|&place| place <= bit / 8).expect("behind the head");
            let (contents, records) = read_all(&flipped).expect("the head is whole");
            assert_eq!(records.len(), record, "bit {bit}");
            // The records of the second batch say that those of the first one were durable.
            let expected = match record {
                0 | 1 => End::Damaged { sequence: 5 + record as u64 },
                _ => End::Torn { lost: (bytes.len() - places[record]) as u64 },
            };
            assert_eq!(contents.end, expected, "bit {bit}");
        }
        for bit in 0..places[0] * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(read_all(&flipped), None, "bit {bit} of the head");
        }
    }

    #[test]
    fn records_out_of_order_repeated_or_of_another_file_are_not_read() {
        let (bytes, places) = file();
        let frame = |index: usize| &bytes[places[index]..places[index + 1]];
        let head = &bytes[..places[0]];
        let swapped = [head, frame(1), frame(0), frame(2), frame(3)].concat();
        assert_eq!(read_all(&swapped).expect("a head").1.len(), 0);
        let repeated = [head, frame(0), frame(0), frame(1)].concat();
        assert_eq!(read_all(&repeated).expect("a head").1.len(), 1);
        let mut other = head.to_vec();
        put_frame(&mut other, SALT ^ 1, 5, 4, b"of a deleted file");
        let (contents, records) = read_all(&other).expect("a head");
        assert!(records.is_empty() && matches!(contents.end, End::Torn { .. }));
    }

    #[test]
    fn records_longer_than_a_window_are_read() {
        let (mut bytes, places) = file();
        bytes.truncate(places[1]);
        let long: Vec<u8> = (0..2 * WINDOW + 9).map(|byte| byte as u8).collect();
        put_frame(&mut bytes, SALT, 6, 4, &long);
        put_frame(&mut bytes, SALT, 7, 4, &[]);
        let (contents, records) = read_all(&bytes).expect("a valid file");
        assert_eq!((records.len(), contents.next, contents.is_ended), (2, 8, true));
        assert!(records[1] == long);
    }
}
