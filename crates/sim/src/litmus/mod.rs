//! Litmus tests of one-sided memory: small programs, and exactly the outcomes that the memory contract allows.
//!
//! A [`Program`] is two or three connections with a few verbs each. [`axioms`] is the contract as data,
//! [`Program::allowed`] computes all outcomes under it, [`programs`] returns over a thousand programs, and
//! [`compare()`] checks a simulator against them.
//!
//! Invariant: nothing here depends on how a NIC is built or simulated. The allowed outcomes follow from a partial order
//! on accesses to cache lines alone.

pub mod axioms;
mod compare;
mod enumerate;
mod program;
mod shapes;

pub use compare::{Coverage, Forbidden, Seeds, Summary, compare, compare_all};
pub use program::{LINE_WORDS, LINES_MAX, Op, Outcome, Piece, Program, ProgramError, Start, Step, WORD_SIZE};
pub use shapes::programs;
