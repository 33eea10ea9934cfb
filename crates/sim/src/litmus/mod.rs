//! Litmus tests of one-sided memory: small programs, each with exactly those outcomes that the memory contract allows.
//!
//! A [`Program`] has one to three connections with a few verbs each. [`axioms`] is the contract as data.
//! [`Program::allowed`] computes all outcomes that the contract allows. [`programs`] returns over a thousand programs
//! of known shapes, and [`suite`] adds all small ones. [`compare()`] checks a simulator against the programs' allowed
//! outcomes.
//!
//! Invariant: this module does not depend on how a NIC is built or simulated. The allowed outcomes follow only from a
//! partial order on accesses to cache lines, and from the rule for atomics.

pub mod axioms;
mod compare;
mod enumerate;
mod program;
mod shapes;
mod small;

pub use compare::{Coverage, Forbidden, Seeds, Summary, compare, compare_all};
pub use program::{LINE_WORDS, LINES_MAX, Op, Outcome, Piece, Program, ProgramError, Start, Step, WORD_SIZE};
pub use shapes::{programs, suite};
