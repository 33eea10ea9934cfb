//! Litmus tests of one-sided memory: small programs, and exactly the outcomes that its contract allows.
//!
//! [`Program`] is two or three connections with a few verbs each, [`axioms`] the contract as data, [`Program::allowed`]
//! all outcomes under it, [`programs`] well over a thousand programs, [`compare()`] holds a simulator to them.
//!
//! Invariant: nothing here knows how a NIC is built, or how ours is simulated. What is allowed follows from a partial
//! order on accesses to cache lines, and from nothing else.

pub mod axioms;
mod compare;
mod enumerate;
mod program;
mod shapes;

pub use compare::{Coverage, Forbidden, Seeds, Summary, compare, compare_all};
pub use program::{LINE_WORDS, LINES_MAX, Op, Outcome, Piece, Program, ProgramError, Start, Step, WORD_SIZE};
pub use shapes::programs;
