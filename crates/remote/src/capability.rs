//! The requests that a fabric supports beyond READ, WRITE and a plain CAS.
//!
//! Invariant: a layer has exactly the capabilities of the fabric that it wraps.

use std::fmt;

/// A set of capabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Capabilities(u8);

impl Capabilities {
    /// Only READ, WRITE, and CAS and FETCH-ADD on aligned 8-byte words, which every fabric supports.
    pub const NONE: Capabilities = Capabilities(0);
    /// Calls to a store's service (two-sided requests).
    pub const CALLS: Capabilities = Capabilities(1 << 0);
    /// PRISM's chains: ops that depend on the previous op, follow a pointer, allocate a buffer, or use scratch.
    pub const CONDITIONAL_OPS: Capabilities = Capabilities(1 << 1);
    /// A CAS that compares and swaps under masks.
    pub const MASKED_CAS: Capabilities = Capabilities(1 << 2);
    /// Atomic words in the memory of the node's NIC.
    pub const ON_CHIP_WORDS: Capabilities = Capabilities(1 << 3);
    /// Chains to one node run in the order in which they were sent.
    pub const ORDER: Capabilities = Capabilities(1 << 4);
    /// An aligned line of 64 bytes is read and written as a whole. Software fabrics copy 16 bytes at a time.
    pub const WHOLE_LINES: Capabilities = Capabilities(1 << 5);
    /// The capabilities of every fabric that executes its chains with [`run`](crate::run()).
    pub const SOFTWARE: Capabilities = Self::CALLS.and(Self::CONDITIONAL_OPS).and(Self::MASKED_CAS);

    const NAMED: [(Capabilities, &'static str); 6] = [
        (Self::CALLS, "calls"),
        (Self::CONDITIONAL_OPS, "conditional ops"),
        (Self::MASKED_CAS, "masked CAS"),
        (Self::ON_CHIP_WORDS, "on-chip words"),
        (Self::ORDER, "order between chains"),
        (Self::WHOLE_LINES, "whole cache lines"),
    ];

    /// Whether this set contains all of `others`.
    pub const fn contains(self, others: Capabilities) -> bool {
        self.0 & others.0 == others.0
    }

    /// Returns the union of this set and `others`.
    pub const fn and(self, others: Capabilities) -> Capabilities {
        Capabilities(self.0 | others.0)
    }

    /// Returns this set without `others`.
    pub const fn without(self, others: Capabilities) -> Capabilities {
        Capabilities(self.0 & !others.0)
    }
}

/// Prints for example `calls, masked CAS`; the empty set prints `none`.
impl fmt::Display for Capabilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = Self::NAMED.into_iter().filter(|(named, _)| self.contains(*named));
        let names: Vec<&str> = names.map(|(_, name)| name).collect();
        f.write_str(if names.is_empty() { "none".into() } else { names.join(", ") }.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_is_named_by_its_members() {
        let both = Capabilities::CALLS.and(Capabilities::ORDER);
        assert_eq!(both.to_string(), "calls, order between chains");
        assert_eq!(both.without(Capabilities::SOFTWARE), Capabilities::ORDER);
        assert_eq!(Capabilities::NONE.to_string(), "none");
        assert!(!Capabilities::SOFTWARE.contains(both));
    }
}
