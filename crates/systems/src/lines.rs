//! Objects whose *lines* have versions, so that one READ shows whether the object is whole (FaRM, NSDI'14, section
//! 4.2).
//!
//! ```text
//! object   | header, 16 bytes | content | filler, to whole lines |
//! ```
//!
//! An object consists of lines of 16 or 64 bytes. The first line begins with the header, which has the object's
//! version. Each other line begins with 16 bits, the version modulo 65,535, and the content fills the rest of all
//! lines. A line of 64 bytes has the mark 65,535 in place of a version while its content changes: a CPU writes such a
//! line in pieces.
//!
//! Invariant: a line has a version only while its whole content is of this version.
//! Invariant: the version of an object rises by 1 with each write. So a READ has the content of one version if it finds
//! this version in all lines and has not taken the time of 65,535 writes.

use zerocopy::little_endian::U16;

/// Size of the header of an object in bytes.
pub(crate) const HEADER_SIZE: usize = 16;
/// Size of the version of a line in bytes.
pub(crate) const LINE_VERSION: usize = size_of::<U16>();
/// Number of bytes that every CPU and fabric copies at once.
const UNIT: usize = 16;
/// In place of the version of a line: its content changes. No version modulo 65,535 has this value.
const MARK: u16 = u16::MAX;
/// The bytes of [`MARK`].
pub(crate) const MARKED: [u8; LINE_VERSION] = MARK.to_le_bytes();

/// How objects are divided into lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lines(usize);

impl Lines {
    /// Lines that every CPU and fabric copies at once. They are not marked.
    pub(crate) const UNITS: Lines = Lines(UNIT);

    /// Lines of 16 or 64 bytes.
    pub(crate) const fn of(size: u8) -> Lines {
        Lines(size as usize)
    }

    /// Offset of a content in its object.
    pub(crate) const fn content_at(self) -> usize {
        match self.0 - HEADER_SIZE {
            0 => self.0 + LINE_VERSION,
            _ => HEADER_SIZE,
        }
    }

    /// Number of bytes of an object with a content of this length, without the filler at its end.
    pub(crate) const fn image_len(self, content: usize) -> usize {
        let rest = content.saturating_sub(self.0 - HEADER_SIZE);
        self.0 + rest.div_ceil(self.0 - LINE_VERSION) * self.0
    }

    /// Whether a line is longer than a CPU writes at once, and so is marked while its content changes.
    pub(crate) const fn are_long(self) -> bool {
        self.0 > UNIT
    }

    /// Offsets of the versions of lines in the `len` bytes of an object after its header.
    pub(crate) fn versions_at(self, len: usize) -> impl Iterator<Item = usize> {
        (self.0 - HEADER_SIZE..len).step_by(self.0)
    }

    /// Marks the lines of an object. `image` holds its bytes after the header.
    pub(crate) fn mark(self, image: &mut [u8]) {
        for at in self.versions_at(image.len()) {
            image[at..at + LINE_VERSION].copy_from_slice(&MARKED);
        }
    }

    /// Encodes the bytes of an object after its header into `out`, which it clears: those of a content that is written
    /// with this version.
    pub(crate) fn encode(self, version: u64, content: &[u8], out: &mut Vec<u8>) {
        let (first, rest) = content.split_at(content.len().min(self.0 - HEADER_SIZE));
        out.clear();
        out.extend_from_slice(first);
        out.resize(self.0 - HEADER_SIZE, 0);
        for line in rest.chunks(self.0 - LINE_VERSION) {
            out.extend_from_slice(&line_version(version));
            out.extend_from_slice(line);
        }
        out.resize(self.image_len(content.len()) - HEADER_SIZE, 0);
    }

    /// Iterates over the lines of an object: whether the line is of this version, and its part of the content.
    pub(crate) fn parts(self, object: &[u8], version: u64) -> impl Iterator<Item = (bool, &[u8])> {
        let version = line_version(version);
        object.chunks(self.0).enumerate().map(move |(number, line)| {
            let prefix = if number == 0 { HEADER_SIZE } else { LINE_VERSION };
            let (prefix, content) = line.split_at_checked(prefix).unwrap_or_default();
            (number == 0 || prefix == version, content)
        })
    }
}

/// The bytes of the version of each line but the first of an object with this version.
pub(crate) fn line_version(version: u64) -> [u8; LINE_VERSION] {
    ((version % u64::from(MARK)) as u16).to_le_bytes()
}
