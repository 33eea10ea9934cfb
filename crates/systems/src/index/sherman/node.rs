//! The bytes of a node, with two versions in each line: the corrected form of the two-level versions.
//!
//! ```text
//! node      | tag | content │ tag | content │ ...                   each line begins with a tag; `│` ends a line
//! content   | head | entry x span          of a leaf               | head | record x span          of an inner node
//! head      | leftmost u64 | sibling u64 | level u8 | flags u8 | count u16 | lengths u8 of low, high | low | high |
//! entry     | tag | length of the key u8, 0 if empty | length of the value u8 or u16 | key | value |
//! record    | length of the key u8 | key | pointer u64 |
//! tag       | version of the node | version of the entry |           4, 8 or 16 bits each
//! ```
//!
//! A *line* is what the fabric reads and writes as a whole: 64 bytes over verbs, 16 bytes where a CPU copies.
//! `leftmost` is the child of the keys below the first record's, and `count` the number of records; both are those of
//! inner nodes. Records are sorted, entries are not. A node has the keys from `low` on and below `high`. If a flag says
//! so, there is no `high`, and no sibling.
//!
//! The tag of a line is that of the entry that spans the line's begin. A change of an entry raises the version of the
//! entry, in its own tag and in those of its lines, and writes no other entry. A change of the whole node raises the
//! version of the node, in all tags.
//!
//! A READ returns each line as it was at some instant. If all tags have one version of the node, no change of the whole
//! node came between the instants; and if all tags of an entry have one version of the entry, the entry is as it was
//! after one change. Both hold unless a version has wrapped, which takes `2^bits` changes: a READ that took longer than
//! that many changes take at least ([`Form::read_max`]) proves nothing.
//!
//! Differs from the paper (4.4): the paper has a version at each end of the node, and at each end of an entry. Then
//! lines in the middle may be older or newer than both ends. CHIME (SOSP 2024) has published the repair, for lines of
//! 64 bytes.
//!
//! Invariant: a change writes whole units of 16 bytes, and no line partly that has another entry's change in flight:
//! the writer holds the lock of the node.

use super::layout::{Damaged, Far, LEVEL_MAX, Layout, Spec};
use super::mutants;
use std::ops::Range;
use std::time::Duration;

/// Number of bytes that every fabric reads and writes as a whole.
const ATOM: usize = 16;
const COUNT_AT: usize = 18;
const LOW_LEN_AT: usize = 20;
const KEYS_AT: usize = 22;
const LEVEL_AT: usize = 16;
const FLAGS_AT: usize = 17;
/// Flag: the node was written.
const WRITTEN: u8 = 1;
/// Flag: the node has no `high`, and no sibling.
const IS_LAST: u8 = 2;
const WORD: usize = size_of::<u64>();

/// Where the parts of a node are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Form {
    pub(super) line: usize,
    /// Size of a tag in bytes.
    tag: usize,
    bits: u32,
    key_max: usize,
    value_max: usize,
    span: usize,
}

impl Form {
    pub(super) fn new(spec: &Spec) -> Form {
        let bits = u32::from(spec.version_bits);
        Form {
            line: spec.line.into(),
            tag: (2 * bits / 8) as usize,
            bits,
            key_max: spec.key_max.into(),
            value_max: spec.value_max as usize,
            span: spec.span.into(),
        }
    }

    /// Number of content bytes of a line.
    const fn part(&self) -> usize {
        self.line - self.tag
    }

    fn head_len(&self) -> usize {
        (KEYS_AT + 2 * self.key_max).next_multiple_of(self.tag)
    }

    /// Number of bytes of the length of a value.
    const fn length_len(&self) -> usize {
        if self.value_max <= u8::MAX as usize { 1 } else { 2 }
    }

    fn entry_len(&self) -> usize {
        (self.tag + 1 + self.length_len() + self.key_max + self.value_max).next_multiple_of(self.tag)
    }

    const fn record_len(&self) -> usize {
        1 + self.key_max + WORD
    }

    /// Number of entries of a leaf, and of records of an inner node.
    pub(super) fn span(&self) -> usize {
        self.span
    }

    fn content_len(&self, is_leaf: bool) -> usize {
        self.head_len() + self.span * if is_leaf { self.entry_len() } else { self.record_len() }
    }

    /// Range of the content bytes of an entry.
    fn entry(&self, index: usize) -> Range<usize> {
        let start = self.head_len() + index * self.entry_len();
        start..start + self.entry_len()
    }

    fn record(&self, index: usize) -> Range<usize> {
        let start = self.head_len() + index * self.record_len();
        start..start + self.record_len()
    }

    /// Offset in the node of a byte of its content.
    fn place(&self, content: usize) -> usize {
        content / self.part() * self.line + self.tag + content % self.part()
    }

    /// Number of bytes that a READ of a node returns.
    pub(super) fn len(&self, is_leaf: bool) -> usize {
        (self.place(self.content_len(is_leaf) - 1) + 1).next_multiple_of(ATOM)
    }

    /// Size of a node in bytes, whatever its level.
    pub(super) fn size(&self) -> usize {
        self.len(true).max(self.len(false))
    }

    /// Indices of the lines that begin within an entry.
    fn lines_of(&self, content: &Range<usize>) -> Range<usize> {
        content.start.div_ceil(self.part())..content.end.div_ceil(self.part())
    }

    /// Range of the bytes of the node that a change of an entry writes.
    pub(super) fn range(&self, index: usize) -> Range<usize> {
        let content = self.entry(index);
        let (start, last) = (self.place(content.start), self.place(content.end - 1));
        // An entry whose own tag is the first content of a line begins behind the line's tag, which is its own, too.
        let start = if content.start.is_multiple_of(self.part()) { start - self.tag } else { start };
        start / ATOM * ATOM..(last + 1).next_multiple_of(ATOM)
    }

    /// Length of the longest READ after which equal versions prove that there was no change: so many changes that a
    /// version wraps take longer.
    ///
    /// Each change of an entry follows a READ of the node under its lock. Over verbs, where lines have 64 bytes, the
    /// paper counts 0.5 us for each (4.4).
    pub(super) fn read_max(&self) -> Duration {
        const CHANGE_MIN_NS: u64 = 500;
        const CHANGE_MIN_BY_CPU_NS: u64 = 100;
        let change_ns = if self.line == ATOM { CHANGE_MIN_BY_CPU_NS } else { CHANGE_MIN_NS };
        Duration::from_nanos(change_ns << self.bits)
    }

    fn versions(&self, tag: u32) -> (u32, u32) {
        let mask = (1 << self.bits) - 1;
        (tag & mask, tag >> self.bits & mask)
    }

    fn tag_of(&self, node: u32, entry: u32) -> u32 {
        let mask = (1 << self.bits) - 1;
        (entry & mask) << self.bits | node & mask
    }
}

/// Reads a tag.
fn tag_at(bytes: &[u8]) -> u32 {
    let mut tag = [0; 4];
    tag[..bytes.len()].copy_from_slice(bytes);
    u32::from_le_bytes(tag)
}

/// An entry of a leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry<'a> {
    /// The READ has met a change of the entry.
    Torn,
    Empty,
    Used {
        key: &'a [u8],
        value: &'a [u8],
    },
}

/// A node that was read, or that is to be written. The buffers are reused.
#[derive(Clone, Debug, Default)]
pub(super) struct Image {
    content: Vec<u8>,
    /// Tags of the lines.
    tags: Vec<u32>,
}

impl Image {
    /// Takes the bytes of a READ apart. Returns false if the READ has met a change of the whole node.
    ///
    /// # Errors
    /// No client writes such bytes.
    pub(super) fn decode(&mut self, form: &Form, level: u8, bytes: &[u8]) -> Result<bool, Damaged> {
        let is_leaf = level == 0;
        if bytes.len() != form.len(is_leaf) {
            return Err(Damaged("a short READ of a node"));
        }
        self.content.clear();
        self.tags.clear();
        for line in bytes.chunks(form.line) {
            let (tag, content) = line.split_at(form.tag);
            self.tags.push(tag_at(tag));
            self.content.extend_from_slice(content);
        }
        self.content.truncate(form.content_len(is_leaf));
        let version = |tag: &u32| form.versions(*tag).0;
        let first = version(&self.tags[0]);
        let is_whole = match mutants::PUBLISHED_VERSIONS.is_on() {
            true => self.tags.last().map(version) == Some(first),
            false => self.tags.iter().all(|tag| version(tag) == first),
        };
        if is_whole {
            self.check(form, level)?;
        }
        Ok(is_whole)
    }

    fn check(&self, form: &Form, level: u8) -> Result<(), Damaged> {
        if self.content[FLAGS_AT] & WRITTEN == 0 {
            return Err(Damaged("a pointer to a node that was never written"));
        }
        if self.level() != level || level > LEVEL_MAX {
            return Err(Damaged("a node of a wrong level"));
        }
        let [low, high] = [0, 1].map(|index| usize::from(self.content[LOW_LEN_AT + index]));
        if low.max(high) > form.key_max || self.count() > form.span || level == 0 && self.count() > 0 {
            return Err(Damaged("a node with an invalid head"));
        }
        if self.high(form).is_some_and(|high| high <= self.low()) {
            return Err(Damaged("a node without a range of keys"));
        }
        if level > 0 {
            let mut before = self.low();
            for index in 0..self.count() {
                let len = usize::from(self.content[form.record(index).start]);
                let key = (len <= form.key_max).then(|| self.record_key(form, index));
                let key = key.filter(|key| *key > before).ok_or(Damaged("records that are not in order"))?;
                before = key;
            }
        }
        Ok(())
    }

    /// Begins a new node, without entries or records.
    pub(super) fn begin(
        &mut self,
        form: &Form,
        level: u8,
        (low, high): (&[u8], Option<&[u8]>),
        sibling: Option<Far>,
    ) {
        let is_leaf = level == 0;
        self.content.clear();
        self.content.resize(form.content_len(is_leaf), 0);
        self.tags.clear();
        self.tags.resize(form.len(is_leaf).div_ceil(form.line), form.tag_of(1, 0));
        self.content[LEVEL_AT] = level;
        for index in 0..if is_leaf { form.span } else { 0 } {
            self.set_tag(form, index, form.tag_of(1, 0));
        }
        self.content[KEYS_AT..KEYS_AT + low.len()].copy_from_slice(low);
        self.content[LOW_LEN_AT] = low.len() as u8;
        self.set_end(form, high, sibling);
    }

    /// Sets `high` and the sibling.
    fn set_end(&mut self, form: &Form, high: Option<&[u8]>, sibling: Option<Far>) {
        self.content[FLAGS_AT] = if high.is_some() { WRITTEN } else { WRITTEN | IS_LAST };
        let high = high.unwrap_or_default();
        let at = KEYS_AT + form.key_max;
        self.content[at..at + form.key_max].fill(0);
        self.content[at..at + high.len()].copy_from_slice(high);
        self.content[LOW_LEN_AT + 1] = high.len() as u8;
        self.content[WORD..2 * WORD].copy_from_slice(&sibling.map_or(0, |at| at.0).to_le_bytes());
    }

    /// Sets the child of the keys below the first record's.
    pub(super) fn set_leftmost(&mut self, child: Far) {
        self.content[..WORD].copy_from_slice(&child.0.to_le_bytes());
    }

    /// Makes this node end before `high`, where its new sibling begins, and removes its entries or records.
    pub(super) fn shrink(&mut self, form: &Form, high: &[u8], sibling: Far) {
        self.set_end(form, Some(high), Some(sibling));
        let start = form.head_len();
        self.content[start..].fill(0);
        self.set_count(0);
    }

    fn set_count(&mut self, count: usize) {
        self.content[COUNT_AT..COUNT_AT + 2].copy_from_slice(&(count as u16).to_le_bytes());
    }

    /// Raises the version of the node, in all tags. The versions of its entries begin anew.
    pub(super) fn raise(&mut self, form: &Form) {
        let raised = form.tag_of(form.versions(self.tags[0]).0.wrapping_add(1), 0);
        self.tags.fill(raised);
        for index in 0..if self.level() == 0 { form.span } else { 0 } {
            self.set_tag(form, index, raised);
        }
    }

    /// Encodes the node.
    pub(super) fn encode(&self, form: &Form, out: &mut Vec<u8>) {
        out.clear();
        for (tag, content) in self.tags.iter().zip(self.content.chunks(form.part())) {
            out.extend_from_slice(&tag.to_le_bytes()[..form.tag]);
            out.extend_from_slice(content);
        }
        out.resize(form.len(self.level() == 0), 0);
    }

    /// Whether nothing was decoded yet.
    pub(super) fn is_empty(&self) -> bool {
        self.content.is_empty()
    }

    pub(super) fn level(&self) -> u8 {
        self.content[LEVEL_AT]
    }

    /// Number of records.
    pub(super) fn count(&self) -> usize {
        usize::from(u16::from_le_bytes([self.content[COUNT_AT], self.content[COUNT_AT + 1]]))
    }

    /// Least key that the node may have.
    pub(super) fn low(&self) -> &[u8] {
        &self.content[KEYS_AT..KEYS_AT + usize::from(self.content[LOW_LEN_AT])]
    }

    /// The keys of the node are below this one. `None` if it is the last of its level.
    pub(super) fn high(&self, form: &Form) -> Option<&[u8]> {
        let at = KEYS_AT + form.key_max;
        let len = usize::from(self.content[LOW_LEN_AT + 1]);
        (self.content[FLAGS_AT] & IS_LAST == 0).then(|| &self.content[at..at + len])
    }

    /// Whether the key is at the right of the node.
    pub(super) fn is_before(&self, form: &Form, key: &[u8]) -> bool {
        self.high(form).is_some_and(|high| key >= high)
    }

    /// The node at the right.
    ///
    /// # Errors
    /// It is the last of its level, or the pointer is damaged.
    pub(super) fn sibling(&self, layout: &Layout) -> Result<Far, Damaged> {
        if self.content[FLAGS_AT] & IS_LAST != 0 {
            return Err(Damaged("a level that ends too early"));
        }
        layout.pointer(word(&self.content, WORD))
    }

    fn set_tag(&mut self, form: &Form, index: usize, tag: u32) {
        let content = form.entry(index);
        self.content[content.start..content.start + form.tag].copy_from_slice(&tag.to_le_bytes()[..form.tag]);
        for line in form.lines_of(&content) {
            self.tags[line] = tag;
        }
    }

    /// Returns an entry of a leaf.
    ///
    /// # Errors
    /// No client writes such an entry.
    pub(super) fn entry<'a>(&'a self, form: &Form, index: usize) -> Result<Entry<'a>, Damaged> {
        let content = form.entry(index);
        let own = tag_at(&self.content[content.start..content.start + form.tag]);
        let mut lines = form.lines_of(&content);
        let is_whole = match mutants::PUBLISHED_VERSIONS.is_on() {
            true => lines.next_back().is_none_or(|last| self.tags[last] == own),
            false => lines.all(|line| self.tags[line] == own),
        };
        if !is_whole {
            return Ok(Entry::Torn);
        }
        let entry = &self.content[content][form.tag..];
        let len = usize::from(entry[0]);
        if len == 0 {
            return Ok(Entry::Empty);
        }
        let (value_len, keys) = match form.length_len() {
            1 => (usize::from(entry[1]), &entry[2..]),
            _ => (usize::from(u16::from_le_bytes([entry[1], entry[2]])), &entry[3..]),
        };
        if len > form.key_max || value_len > form.value_max {
            return Err(Damaged("an entry with an invalid length"));
        }
        Ok(Entry::Used { key: &keys[..len], value: &keys[form.key_max..form.key_max + value_len] })
    }

    /// Puts a key with its value into an entry, without a new version.
    fn fill(&mut self, form: &Form, index: usize, key: &[u8], value: &[u8]) {
        let content = form.entry(index);
        let entry = &mut self.content[content][form.tag..];
        entry.fill(0);
        entry[0] = key.len() as u8;
        let keys_at = 1 + form.length_len();
        entry[1..keys_at].copy_from_slice(&value.len().to_le_bytes()[..form.length_len()]);
        entry[keys_at..keys_at + key.len()].copy_from_slice(key);
        let value_at = keys_at + form.key_max;
        entry[value_at..value_at + value.len()].copy_from_slice(value);
    }

    /// Changes an entry, and raises its version. The key is empty if the entry becomes empty.
    pub(super) fn set_entry(&mut self, form: &Form, index: usize, key: &[u8], value: &[u8]) {
        let start = form.entry(index).start;
        let (node, entry) = form.versions(tag_at(&self.content[start..start + form.tag]));
        self.fill(form, index, key, value);
        self.set_tag(form, index, form.tag_of(node, entry.wrapping_add(1)));
    }

    /// Puts entries into a leaf without any, before the whole node is written.
    pub(super) fn fill_all(&mut self, form: &Form, entries: &[(Vec<u8>, Vec<u8>)]) {
        for (index, (key, value)) in entries.iter().enumerate() {
            self.fill(form, index, key, value);
        }
    }

    fn record_key(&self, form: &Form, index: usize) -> &[u8] {
        let record = &self.content[form.record(index)];
        &record[1..1 + usize::from(record[0])]
    }

    /// Returns a record of an inner node: the key and the pointer. The pointer leads to the keys from this one on.
    ///
    /// # Errors
    /// The pointer is damaged.
    pub(super) fn record<'a>(&'a self, layout: &Layout, index: usize) -> Result<(&'a [u8], Far), Damaged> {
        let form = &layout.form;
        let range = form.record(index);
        let pointer = layout.pointer(word(&self.content, range.end - WORD))?;
        Ok((self.record_key(form, index), pointer))
    }

    /// Puts records into an inner node.
    pub(super) fn fill_records(&mut self, form: &Form, records: &[(Vec<u8>, Far)]) {
        for (index, (key, pointer)) in records.iter().enumerate() {
            let range = form.record(index);
            let record = &mut self.content[range];
            record.fill(0);
            record[0] = key.len() as u8;
            record[1..1 + key.len()].copy_from_slice(key);
            let end = record.len();
            record[end - WORD..].copy_from_slice(&pointer.0.to_le_bytes());
        }
        self.set_count(records.len());
    }

    /// The child of the keys below the first record's.
    ///
    /// # Errors
    /// The pointer is damaged.
    pub(super) fn leftmost(&self, layout: &Layout) -> Result<Far, Damaged> {
        layout.pointer(word(&self.content, 0))
    }

    /// The child of a key that is in the node's range.
    ///
    /// # Errors
    /// The pointer is damaged.
    pub(super) fn child(&self, layout: &Layout, key: &[u8]) -> Result<Far, Damaged> {
        let (mut first, mut end) = (0, self.count());
        while first < end {
            let middle = (first + end) / 2;
            if self.record_key(&layout.form, middle) <= key { first = middle + 1 } else { end = middle }
        }
        match first.checked_sub(1) {
            Some(index) => Ok(self.record(layout, index)?.1),
            None => self.leftmost(layout),
        }
    }

    /// All children with the least keys that lead to them, in order.
    ///
    /// # Errors
    /// A pointer is damaged.
    pub(super) fn children(&self, layout: &Layout) -> Result<Vec<(Vec<u8>, Far)>, Damaged> {
        let mut children = vec![(self.low().to_vec(), self.leftmost(layout)?)];
        for index in 0..self.count() {
            let (key, at) = self.record(layout, index)?;
            children.push((key.to_vec(), at));
        }
        Ok(children)
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + WORD].try_into().expect("a word has 8 bytes"))
}
