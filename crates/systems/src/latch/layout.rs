//! The bytes of a store of latched objects, which all lie in the table.
//!
//! ```text
//! table            | latch u64 | x objects, if separate | object | padding | x objects
//! pessimistic      | L | content |          separate:  | content |          unlatch:  | content | L |
//! V2               | V | L | content |                          footer:  | content | V | L |
//! CRC              | V | L | CRC | content |                    footer:  | content | V | CRC | L |
//! version per line | V | L | content │ V | content │ ...        footer:  | V | content │ ... │ V | content | L |
//! ```
//!
//! L is the latch, V the version of the content, and `│` the end of a cache line. All are little-endian words of 8
//! bytes. In a store that was never written, all are 0. An optimistic object begins at a line and consists of whole
//! lines.
//!
//! The *image* of an object is the range of its bytes that one READ returns and one WRITE stores. Under a
//! reader/writer latch, and where the latch is released by an atomic of its own, it is the content alone.
//!
//! Differs from the artifact: with padding, an optimistic object is padded by a line and not by 8 bytes, because its
//! version and latch must share a line.

use super::leased::LeaseSpec;
use super::scheme::{Reads, Scheme, Steps};
use crate::redo::Object as Guarded;
use farside_remote::Addr;
use farside_remote::service::Extent;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Number of objects of the largest store.
pub const OBJECTS_MAX: u64 = 1 << 32;
/// Largest content of an object in bytes.
pub const LEN_MAX: u32 = 32 << 10;
/// Size of a cache line in bytes.
const LINE: usize = 64;
const WORD: usize = size_of::<u64>();

/// Place of the latches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Placement {
    /// In the objects, which follow each other without a gap.
    #[default]
    Inline,
    /// In the objects, with a gap after each object, so that the latches are spread over the NIC's lock slots (section
    /// 2.4).
    Padded,
    /// In a dense array before the objects.
    Separate,
}

impl Placement {
    /// All placements.
    pub const ALL: [Placement; 3] = [Placement::Inline, Placement::Padded, Placement::Separate];

    /// Name of the placement in flags and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Placement::Inline => "inline",
            Placement::Padded => "padded",
            Placement::Separate => "separate",
        }
    }
}

/// Options of a new store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Latching {
    /// How clients synchronize; if absent, by the scheme `v2`.
    pub scheme: Option<Scheme>,
    /// Place of the latches.
    pub placement: Placement,
}

impl Latching {
    /// No options: the same as the default, as a constant.
    pub const NONE: Latching = Latching { scheme: None, placement: Placement::Inline };

    /// Number of bytes of an object of `len` bytes that an operation checksums, for cost models.
    pub fn checksummed(&self, len: u64) -> u64 {
        if self.scheme.is_some_and(|scheme| scheme.reads == Reads::Checksum) { len } else { 0 }
    }
}

/// Parameters of a store, stored as JSON in the catalog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// Number of objects.
    pub objects: u64,
    /// Bytes of an object's content, a multiple of 8.
    pub len: u32,
    /// How clients synchronize.
    pub scheme: Scheme,
    /// Place of the latches.
    #[serde(default)]
    pub placement: Placement,
    /// Whether the lines of a WRITE may land in any order (relaxed ordering). If so, no WRITE releases a latch.
    #[serde(default)]
    pub relaxed: bool,
    /// Leases of the clients; only of exclusive latches. If absent, a latch has no owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<LeaseSpec>,
}

impl Spec {
    /// Checks that clients can use a store with these parameters.
    ///
    /// # Errors
    /// Returns the limit that the parameters exceed.
    pub(super) fn check(&self) -> Result<(), String> {
        let Spec { objects, len, scheme, placement, .. } = *self;
        if !(1..=OBJECTS_MAX).contains(&objects) {
            return Err(format!("{objects} objects, and 1 to {OBJECTS_MAX} are possible"));
        }
        if !(WORD as u32..=LEN_MAX).contains(&len) || !len.is_multiple_of(WORD as u32) {
            return Err(format!("objects of {len} bytes, and multiples of 8 up to {LEN_MAX} are possible"));
        }
        if placement == Placement::Separate && (scheme.is_optimistic() || scheme.is_footer()) {
            return Err(format!("separate latches, and the scheme {scheme} needs them in the objects"));
        }
        if let Some(lease) = self.lease {
            lease.check()?;
            if scheme.has_shared_mode() {
                return Err(format!("leases, and the scheme {scheme} has a latch of several holders"));
            }
        }
        if self.table_len().is_none() {
            return Err("more bytes than any node has".to_owned());
        }
        Ok(())
    }

    /// Number of content bytes of a line of an object with a version in each line, of which one line also has the
    /// latch.
    const LINE_CONTENT: usize = LINE - WORD;

    /// Size of an object's image in bytes.
    fn image_len(&self) -> usize {
        let len = self.len as usize;
        match (self.scheme.reads, self.scheme.is_footer()) {
            (Reads::Latched, false) => len,
            (Reads::Latched, true) => len + WORD,
            (Reads::Twice, _) => (len + 2 * WORD).next_multiple_of(LINE),
            (Reads::Checksum, _) => (len + 3 * WORD).next_multiple_of(LINE),
            (Reads::Versions, _) => (len + WORD).div_ceil(Spec::LINE_CONTENT) * LINE,
        }
    }

    /// Offset of the image within an object.
    fn image_offset(&self) -> u64 {
        let has_latch_before = !self.scheme.is_optimistic() && !self.scheme.is_footer();
        if has_latch_before && self.placement != Placement::Separate { WORD as u64 } else { 0 }
    }

    /// Distance between two objects.
    fn stride(&self) -> u64 {
        let gap = match (self.placement, self.scheme.is_optimistic()) {
            (Placement::Padded, true) => LINE,
            (Placement::Padded, false) => WORD,
            _ => 0,
        };
        self.image_offset() + (self.image_len() + gap) as u64
    }

    /// Offset of the first latch or object in the table.
    fn latches_offset(&self) -> u64 {
        self.lease.map_or(0, |lease| lease.size(self.image_len())).next_multiple_of(LINE as u64)
    }

    /// Offset of the first object in the table.
    fn objects_offset(&self) -> u64 {
        let latches = if self.placement == Placement::Separate { self.objects * WORD as u64 } else { 0 };
        self.latches_offset() + latches.next_multiple_of(LINE as u64)
    }

    /// Size of the table in bytes; `None` if it exceeds 64 bits.
    pub(super) fn table_len(&self) -> Option<u64> {
        self.objects.checked_mul(self.stride())?.checked_add(self.objects_offset())
    }
}

/// Longest content of an object that takes at most `bytes` bytes, with its latch and versions, and without padding.
///
/// # Errors
/// Returns the least number of bytes of an object of this scheme.
pub(super) fn len_of_object(scheme: Scheme, bytes: u32) -> Result<u32, u32> {
    let taken = |len: u32| {
        let spec =
            Spec { objects: 1, len, scheme, placement: Placement::Inline, relaxed: false, lease: None };
        spec.stride()
    };
    let words = 1..=bytes.min(LEN_MAX) / WORD as u32;
    let mut lengths = words.rev().map(|words| words * WORD as u32);
    lengths.find(|&len| taken(len) <= u64::from(bytes)).ok_or(taken(WORD as u32) as u32)
}

/// The table of a store.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    pub(super) spec: Spec,
    pub(super) table: Extent,
}

/// Addresses of an object.
#[derive(Clone, Copy)]
pub(super) struct Object {
    pub(super) latch: Addr,
    pub(super) image: Addr,
}

impl Layout {
    /// Reads the parameters of a store whose table lies at `table`.
    ///
    /// # Errors
    /// The parameters are invalid, or need a larger table.
    pub(super) fn new(parameters: &str, table: Extent) -> Result<Layout, String> {
        let wrong = |reason: String| format!("invalid parameters in the catalog: {reason}");
        let spec: Spec = serde_json::from_str(parameters).map_err(|error| wrong(error.to_string()))?;
        spec.check().map_err(wrong)?;
        let fits = spec.table_len().is_some_and(|len| len <= table.len);
        if !fits || table.at.checked_add(table.len).is_none() {
            return Err(wrong(format!("{} objects in {} bytes", spec.objects, table.len)));
        }
        Ok(Layout { spec, table })
    }

    /// Addresses of an object; `None` if the store has fewer objects.
    pub(super) fn object(&self, number: u64) -> Option<Object> {
        let Layout { spec, table } = self;
        if number >= spec.objects {
            return None;
        }
        let object = Addr::new(table.at).plus(spec.objects_offset() + number * spec.stride());
        let image = object.plus(spec.image_offset());
        let latch = match (spec.placement, self.latch_in_image()) {
            (Placement::Separate, _) => {
                Addr::new(table.at).plus(spec.latches_offset() + number * WORD as u64)
            }
            (_, Some(latch)) => image.plus(latch.start as u64),
            (_, None) => object,
        };
        Some(Object { latch, image })
    }

    /// An object, for redo records.
    pub(super) fn guarded(&self, object: &Object) -> Guarded {
        Guarded { lock: object.latch, at: object.image, len: self.image_len() }
    }

    /// Length of the image in bytes.
    pub(super) fn image_len(&self) -> u32 {
        self.spec.image_len() as u32
    }

    /// Range of the latch within the image; `None` if the image does not contain it.
    fn latch_in_image(&self) -> Option<Range<usize>> {
        let Scheme { reads, .. } = self.spec.scheme;
        let at = match (reads, self.spec.scheme.is_footer()) {
            (Reads::Latched, false) => return None,
            (_, true) => self.spec.image_len() - WORD,
            (_, false) => WORD,
        };
        Some(at..at + WORD)
    }

    /// Offset of the version within the image. In an object with a version in each line, that of the latch's line.
    fn version_at(&self) -> usize {
        let len = self.spec.image_len();
        match (self.spec.scheme.reads, self.spec.scheme.is_footer()) {
            (Reads::Twice, true) => len - 2 * WORD,
            (Reads::Checksum, true) => len - 3 * WORD,
            (Reads::Versions, true) => len - LINE,
            _ => 0,
        }
    }

    /// Offset of the checksum within the image.
    fn checksum_at(&self) -> usize {
        if self.spec.scheme.is_footer() { self.spec.image_len() - 2 * WORD } else { 2 * WORD }
    }

    /// Range of the image from the version to the latch, within one line.
    pub(super) fn guard(&self) -> Range<usize> {
        let latch = self.latch_in_image().expect("an optimistic object has its latch in its image");
        let version = self.version_at();
        version.min(latch.start)..(version + WORD).max(latch.end)
    }

    /// Ranges of the image that hold the content, in order.
    fn pieces(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let Scheme { reads, .. } = self.spec.scheme;
        let (is_footer, image_len) = (self.spec.scheme.is_footer(), self.spec.image_len());
        let mut left = self.spec.len as usize;
        let first = match (reads, is_footer) {
            (Reads::Latched, _) | (_, true) => 0,
            (Reads::Twice | Reads::Versions, false) => 2 * WORD,
            (Reads::Checksum, false) => 3 * WORD,
        };
        let mut at = if reads == Reads::Versions && is_footer { WORD } else { first };
        std::iter::from_fn(move || {
            if left == 0 {
                return None;
            }
            let end = match reads {
                Reads::Versions => (at / LINE + 1) * LINE,
                _ => image_len,
            };
            let end = if is_footer { end.min(image_len - WORD) } else { end };
            let piece = at..end.min(at + left);
            left -= piece.len();
            at = end + WORD;
            Some(piece)
        })
    }

    /// Range of the image that holds the content and no other word.
    ///
    /// # Panics
    /// If the content is not in one piece.
    pub(super) fn content_range(&self) -> Range<usize> {
        let mut pieces = self.pieces();
        let only = pieces.next().expect("an object has content");
        assert!(pieces.next().is_none(), "the content is not in one piece");
        only
    }

    /// Copies the content out of an image.
    pub(super) fn unpack(&self, image: &[u8], content: &mut Vec<u8>) {
        content.clear();
        self.pieces().for_each(|piece| content.extend_from_slice(&image[piece]));
    }

    /// Sets the latch in an image, if the image contains it.
    pub(super) fn set_latch(&self, image: &mut [u8], word: u64) {
        if let Some(latch) = self.latch_in_image() {
            put(image, latch.start, word);
        }
    }

    /// Stores content into an image, with the next version. `latch` is the word of the latch, if the image contains it,
    /// once the image has been written.
    pub(super) fn pack(&self, content: &[u8], image: &mut [u8], latch: u64) {
        let mut left = content;
        for piece in self.pieces() {
            let (now, later) = left.split_at(piece.len());
            image[piece].copy_from_slice(now);
            left = later;
        }
        self.set_latch(image, latch);
        if !self.spec.scheme.is_optimistic() {
            return;
        }
        let version = word(image, self.version_at()).wrapping_add(1);
        match self.spec.scheme.reads {
            Reads::Versions => image.chunks_exact_mut(LINE).for_each(|line| put(line, 0, version)),
            _ => put(image, self.version_at(), version),
        }
        if self.spec.scheme.reads == Reads::Checksum {
            put(image, self.checksum_at(), checksum(content));
        }
    }

    /// Latch in an image that contains it.
    pub(super) fn latch_of(&self, image: &[u8]) -> Option<u64> {
        self.latch_in_image().map(|latch| word(image, latch.start))
    }

    /// Version and latch in the guard of an image ([`Layout::guard`]).
    pub(super) fn version_and_latch(&self, guard: &[u8]) -> (u64, u64) {
        let from = self.guard().start;
        let latch = self.latch_in_image().expect("an optimistic object has its latch in its image").start;
        (word(guard, self.version_at() - from), word(guard, latch - from))
    }

    /// Whether the checksum in an image is that of the content. No content was stored before the first version.
    pub(super) fn has_right_checksum(&self, image: &[u8]) -> bool {
        let content = &image[self.content_range()];
        match word(image, self.version_at()) {
            0 => content.iter().all(|&byte| byte == 0),
            _ => word(image, self.checksum_at()) == checksum(content),
        }
    }

    /// The versions of the lines of an image.
    pub(super) fn line_versions(image: &[u8]) -> impl Iterator<Item = u64> + '_ {
        image.chunks_exact(LINE).map(|line| word(line, 0))
    }

    /// Whether a WRITE of the image can release the latch.
    pub(super) fn is_ordered(&self) -> bool {
        self.spec.scheme.steps == Steps::Unlatch && !self.spec.relaxed
    }
}

fn checksum(content: &[u8]) -> u64 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, content)
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + WORD].try_into().expect("a word has 8 bytes"))
}

fn put(bytes: &mut [u8], at: usize, word: u64) {
    bytes[at..at + WORD].copy_from_slice(&word.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use farside_remote::Key;

    fn layouts() -> impl Iterator<Item = Layout> {
        let specs = Scheme::ALL.into_iter().flat_map(|(_, scheme)| {
            Placement::ALL.into_iter().flat_map(move |placement| {
                [8, 40, 48, 56, 96, 104, 112, 1000, 4080].map(|len| Spec {
                    objects: 5,
                    len,
                    scheme,
                    placement,
                    relaxed: false,
                    lease: Some(LeaseSpec { us: 1000, ids: 3, lanes: 4 }).filter(|_| len == 104),
                })
            })
        });
        specs.filter(|spec| spec.check().is_ok()).map(|spec| {
            let table =
                Extent { key: Key::new(1, 1), at: 1 << 20, len: spec.table_len().expect("it is small") };
            Layout { spec, table }
        })
    }

    #[test]
    fn content_goes_into_an_image_and_comes_out_and_nothing_overlaps() {
        let mut count = 0;
        for layout in layouts() {
            let mut image = vec![0; layout.image_len() as usize];
            let content: Vec<u8> = (0..layout.spec.len).map(|at| (at % 251) as u8 + 1).collect();
            for (version, word) in [(1, 0x70001), (2, 0)] {
                layout.pack(&content, &mut image, word);
                let mut found = Vec::new();
                layout.unpack(&image, &mut found);
                assert_eq!(found, content, "{:?}", layout.spec);
                assert!(layout.latch_of(&image).is_none_or(|latch| latch == word));
                if !layout.spec.scheme.is_optimistic() {
                    continue;
                }
                let guard = layout.guard();
                assert_eq!(guard.start / LINE, (guard.end - 1) / LINE, "version and latch share a line");
                assert_eq!(layout.version_and_latch(&image[guard]), (version, word));
                match layout.spec.scheme.reads {
                    Reads::Checksum => {
                        assert!(layout.has_right_checksum(&image));
                        let at = layout.content_range().start;
                        image[at] ^= 1;
                        assert!(!layout.has_right_checksum(&image));
                        image[at] ^= 1;
                    }
                    Reads::Versions => assert!(Layout::line_versions(&image).all(|each| each == version)),
                    _ => {}
                }
            }
            count += 1;
        }
        assert!(count > 200, "{count}");
    }

    #[test]
    fn objects_do_not_overlap_and_their_words_are_aligned() {
        for layout in layouts() {
            let mut end = layout.table.at + layout.spec.objects_offset();
            for number in 0..5 {
                let Object { latch, image } = layout.object(number).expect("the store has 5 objects");
                let (latch, image) = (latch.raw(), image.raw());
                assert!(latch.is_multiple_of(8) && image.is_multiple_of(8), "{:?}", layout.spec);
                assert!(image >= end && latch >= layout.table.at, "{:?}", layout.spec);
                assert!(!layout.spec.scheme.is_optimistic() || image.is_multiple_of(64));
                end = (image + u64::from(layout.image_len())).max(latch + 8);
                // A WRITE of several lines lands in the order of their addresses, so the latch's line is the last.
                assert!(!layout.spec.scheme.is_footer() || latch + 8 == end, "{:?}", layout.spec);
            }
            assert!(layout.object(5).is_none());
            assert!(end <= layout.table.at + layout.table.len, "{:?}", layout.spec);
        }
    }
}
