//! What is torn, stale or lost, whatever a protocol says.
//!
//! Each value that writers write has a number, and each of its bytes is that number. Write 0 is the content at the
//! beginning.
//!
//! - A value is *torn* if its bytes have different numbers.
//! - A read is *stale* if it returned write n, although another write, which was created after n had completed, was
//!   complete before the read began.
//! - A write is *lost* if two writers have changed the same value, each as the next one.
//! - Operations are *stuck* if each starts again and again, and nothing else goes on.

use farside_sim::world::Nanos;
use serde::Serialize;
use std::ops::Range;

/// Maximum number of writes of a run, so that numbers fit in a byte.
pub const WRITES_MAX: usize = 250;

/// Kind of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A torn value was accepted.
    Torn,
    /// A stale value was accepted.
    Stale,
    /// Two writers have changed the same value.
    Lost,
    /// Operations start again without end.
    Stuck,
}

impl Kind {
    /// What has happened, as a sentence without its end.
    pub const fn sentence(self) -> &'static str {
        match self {
            Kind::Torn => "a torn value was accepted",
            Kind::Stale => "a stale value was accepted",
            Kind::Lost => "a write was lost",
            Kind::Stuck => "operations start again without end",
        }
    }
}

/// What a run has shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Kind of the finding.
    pub kind: Kind,
    /// The numbers that show it, as a sentence.
    pub text: String,
}

/// Bytes that the READs of an attempt have returned.
#[derive(Clone, Debug)]
pub struct Seen {
    bytes: Vec<u8>,
    is_seen: Vec<bool>,
}

impl Seen {
    /// Nothing of an object of `size` bytes.
    pub fn nothing(size: usize) -> Seen {
        Seen { bytes: vec![0; size], is_seen: vec![false; size] }
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.is_seen.fill(false);
    }

    /// Adds the bytes that a READ at offset `at` has returned.
    pub fn add(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        self.is_seen[at..at + bytes.len()].fill(true);
    }

    /// The data bytes that were seen, in order, each with its offset.
    fn data<'a>(&'a self, data: &'a [Range<usize>]) -> impl Iterator<Item = (usize, u8)> + 'a {
        data.iter().cloned().flatten().filter(|&at| self.is_seen[at]).map(|at| (at, self.bytes[at]))
    }

    /// Number of the write whose data was seen; `None` if none was seen.
    ///
    /// # Errors
    /// The data is torn: describes its numbers.
    pub fn whole(&self, data: &[Range<usize>]) -> Result<Option<u8>, String> {
        let mut numbers = self.data(data).map(|(_, number)| number);
        let Some(first) = numbers.next() else { return Ok(None) };
        if numbers.all(|number| number == first) { Ok(Some(first)) } else { Err(self.pieces(data)) }
    }

    /// Describes which bytes are of which write: `bytes 8 to 63 of write 1, bytes 64 to 71 of write 0`.
    fn pieces(&self, data: &[Range<usize>]) -> String {
        let mut pieces: Vec<(usize, usize, u8)> = Vec::new();
        for (at, number) in self.data(data) {
            match pieces.last_mut() {
                // Data on both sides of a version is one piece.
                Some((_, last, of)) if *of == number => *last = at,
                _ => pieces.push((at, at, number)),
            }
        }
        let texts: Vec<String> = pieces
            .into_iter()
            .map(|(first, last, number)| match first == last {
                true => format!("byte {first} of write {number}"),
                false => format!("bytes {first} to {last} of write {number}"),
            })
            .collect();
        texts.join(", ")
    }
}

/// Names the writes whose data these bytes are: `write 1`, `writes 0, 1`.
pub fn numbers_text(bytes: &[u8]) -> String {
    let mut numbers: Vec<u8> = bytes.to_vec();
    numbers.dedup();
    let texts: Vec<String> = numbers.iter().map(u8::to_string).collect();
    format!("{} {}", if texts.len() == 1 { "write" } else { "writes" }, texts.join(", "))
}

/// Value that the writer had read when it created a new one.
#[derive(Clone, Debug)]
enum Base {
    /// The writer has not READ all data.
    Unread,
    /// The value of this write.
    Write(u8),
    /// A torn value.
    Torn(String),
}

#[derive(Clone, Debug)]
struct Write {
    created: Nanos,
    completed: Option<Nanos>,
    base: Base,
}

/// All writes of a run.
#[derive(Clone, Debug)]
pub struct Truth {
    data: Vec<Range<usize>>,
    writes: Vec<Write>,
}

impl Truth {
    /// Begins with write 0 at these places.
    pub fn new(data: &[Range<usize>]) -> Truth {
        let first = Write { created: 0, completed: Some(0), base: Base::Unread };
        Truth { data: data.to_vec(), writes: vec![first] }
    }

    /// Number of writes created so far, without write 0.
    pub fn count(&self) -> usize {
        self.writes.len() - 1
    }

    /// Creates a write: fills the data of a writer's copy. `seen` is what the writer has READ in this attempt. Returns
    /// the number of the write; `None`, with the copy unchanged, if there are too many.
    pub fn create(&mut self, image: &mut [u8], seen: &Seen, now: Nanos) -> Option<u8> {
        let number =
            u8::try_from(self.writes.len()).ok().filter(|&number| usize::from(number) <= WRITES_MAX)?;
        let has_read_all = self.data.iter().cloned().flatten().all(|at| seen.is_seen[at]);
        let base = match seen.whole(&self.data) {
            Ok(Some(base)) if has_read_all => Base::Write(base),
            Err(pieces) if has_read_all => Base::Torn(pieces),
            _ => Base::Unread,
        };
        self.data.iter().for_each(|range| image[range.clone()].fill(number));
        self.writes.push(Write { created: now, completed: None, base });
        Some(number)
    }

    /// A write has completed.
    ///
    /// # Errors
    /// It has changed a torn value, or one that another completed write had changed.
    pub fn complete(&mut self, number: u8, now: Nanos) -> Result<(), Finding> {
        self.writes[usize::from(number)].completed = Some(now);
        let base = match &self.writes[usize::from(number)].base {
            Base::Unread => return Ok(()),
            Base::Torn(pieces) => {
                let text = format!("write {number} changed a torn value: {pieces}");
                return Err(Finding { kind: Kind::Torn, text });
            }
            Base::Write(base) => *base,
        };
        let is_same = |(other, write): &(usize, &Write)| {
            *other != usize::from(number)
                && write.completed.is_some()
                && matches!(write.base, Base::Write(theirs) if theirs == base)
        };
        match self.writes.iter().enumerate().find(is_same) {
            None => Ok(()),
            Some((other, _)) => {
                let text =
                    format!("write {other} and write {number} have both changed the value of write {base}");
                Err(Finding { kind: Kind::Lost, text })
            }
        }
    }

    /// A read that began at a time was accepted. Returns the number of the write that it returned; `None` if it has
    /// READ no data.
    ///
    /// # Errors
    /// The value is torn or stale.
    pub fn accept(&self, seen: &Seen, began: Nanos) -> Result<Option<u8>, Finding> {
        let number = match seen.whole(&self.data) {
            Ok(Some(number)) => number,
            Ok(None) => return Ok(None),
            Err(pieces) => {
                return Err(Finding { kind: Kind::Torn, text: format!("the accepted value has {pieces}") });
            }
        };
        let Some(completed) = self.writes.get(usize::from(number)).map(|write| write.completed) else {
            let text = format!("the accepted value has the bytes {number}, which no writer has written");
            return Err(Finding { kind: Kind::Torn, text });
        };
        let is_newer = |write: &Write| {
            completed.is_some_and(|completed| completed <= write.created)
                && write.completed.is_some_and(|completed| completed < began)
        };
        match self.writes.iter().skip(1).position(is_newer) {
            Some(newer) if newer + 1 != usize::from(number) => {
                let text = format!(
                    "the accepted value is that of write {number}, but write {} was complete before the read began",
                    newer + 1
                );
                Err(Finding { kind: Kind::Stale, text })
            }
            _ => Ok(Some(number)),
        }
    }
}
