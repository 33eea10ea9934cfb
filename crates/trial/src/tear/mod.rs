//! Search for torn and stale reads: how a reader accepts bytes that no write has written, or that an older write has
//! written, although its protocol was followed.
//!
//! A [`Protocol`] is a layout and the steps of writers and readers as verbs. It is described by a TOML file
//! ([`Description`]), or implemented in Rust. [`search()`] runs it in many short schedules on the simulator's NIC
//! ([`farside_sim::nic`]), which tears READs and reorders accesses as far as the memory contract allows. It shrinks the
//! first schedule with a [`Finding`]. [`mod@story`] and [`mod@picture`] show that schedule.
//!
//! - [`layout`]: fields and their bytes;
//! - [`expression`]: conditions and values, such as the rule by which a reader accepts;
//! - [`program`]: the steps of an operation, and their interpreter;
//! - [`description`]: the TOML file;
//! - [`truth`]: what is torn, stale or lost;
//! - [`schedule`]: one run on the NIC;
//! - [`search()`], [`mod@shrink`]: many runs, and the shortest one.
//!
//! Invariant: the truth shares no code with the reader's rule. Each byte of the data has the number of the write that
//! wrote it, and [`truth`] looks at these numbers alone; a protocol can neither see nor choose them.
//!
//! Invariant: the same protocol, plan and seed give the same run.

pub mod description;
pub mod expression;
pub mod layout;
pub mod picture;
pub mod program;
pub mod schedule;
pub mod search;
pub mod shrink;
pub mod story;
pub mod truth;

pub use description::Description;
pub use schedule::{Plan, Ran};
pub use search::{Coverage, Found, Search, search};
pub use truth::Finding;

use farside_sim::nic::Verb;
use std::fmt;
use std::ops::Range;

/// Bytes that writers and readers share, in one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Content of the object at the beginning. The object starts at a cache line. Its data bytes are 0: they are those
    /// of write 0.
    pub start: Vec<u8>,
    /// Places of the data: the bytes of the value that is written and read.
    pub data: Vec<Range<usize>>,
    /// Maximum number of writers at the same time.
    pub writers_max: usize,
    /// Maximum number of readers at the same time.
    pub readers_max: usize,
}

/// Result of an attempt to carry out an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attempt {
    /// The operation is done. A reader accepts what it has read.
    Done,
    /// The operation starts again.
    Again,
}

/// A layout, and how writers and readers access it.
///
/// Each attempt of an operation starts anew: a client remembers nothing but what it READs.
pub trait Protocol {
    /// The object.
    fn shape(&self) -> &Shape;

    /// Names of the writers' operations; at least one.
    fn kinds(&self) -> &[String];

    /// Attempts the writers' operation with this index in [`Protocol::kinds`]. [`Far::update`] gives the new value.
    fn write<F: Far>(&self, far: &F, kind: usize) -> impl Future<Output = Attempt>;

    /// Attempts a read. The value read is that of the data bytes which READs of this attempt have returned.
    fn read<F: Far>(&self, far: &F) -> impl Future<Output = Attempt>;

    /// Describes bytes of the object from offset `at` on, for people.
    fn describe(&self, at: usize, bytes: &[u8]) -> String {
        let numbers: Vec<String> = bytes.iter().map(u8::to_string).collect();
        format!("{at}: {}", numbers.join(" "))
    }
}

/// A verb to post.
#[derive(Clone, Debug)]
pub struct Posting {
    /// The verb. Its address is an offset in the object.
    pub verb: Verb,
    /// Whether the verb waits until the earlier READs and atomics of this client have completed.
    pub is_fenced: bool,
    /// The verb as people write it.
    pub text: std::rc::Rc<str>,
}

/// A client's access to the object.
pub trait Far {
    /// Posts verbs in one list. The returned future waits for their completions, and returns a result for each: the
    /// bytes of a READ, the old word of an atomic, nothing for a WRITE. If the future is dropped, the verbs take effect
    /// all the same.
    fn post(&self, verbs: Vec<Posting>) -> impl Future<Output = Vec<Vec<u8>>>;

    /// Gives the data bytes of `image`, a private copy of the whole object, a new value.
    fn update(&self, image: &mut [u8]);
}

/// A description that cannot be used. The message names the remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unusable {
    /// Number of the line, from 1 on; `None` if the whole file is meant.
    pub line: Option<usize>,
    /// What is wrong, and the remedy.
    pub reason: String,
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "line {line}: {}", self.reason),
            None => f.write_str(&self.reason),
        }
    }
}

impl std::error::Error for Unusable {}
