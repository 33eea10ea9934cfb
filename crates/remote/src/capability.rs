//! What a fabric can have a node do beyond READ, WRITE and a plain CAS.
//!
//! Invariant: a layer has the capabilities of the fabric that it wraps, and no others.

use std::fmt;

/// A set of capabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Capabilities(u8);

impl Capabilities {
    /// READ, WRITE, and CAS and FETCH-ADD on aligned words of 8 bytes: what every fabric has.
    pub const NONE: Capabilities = Capabilities(0);
    /// Calls to the service of a store: the two-sided way.
    pub const CALLS: Capabilities = Capabilities(1 << 0);
    /// PRISM's chains: ops that depend on the op before, follow a pointer, take a buffer, or use scratch.
    pub const CONDITIONAL_OPS: Capabilities = Capabilities(1 << 1);
    /// A CAS that compares and swaps under masks.
    pub const MASKED_CAS: Capabilities = Capabilities(1 << 2);
    /// Words in the memory of the NIC.
    pub const ON_CHIP_WORDS: Capabilities = Capabilities(1 << 3);
    /// Chains to one node run in the order in which they were asked.
    pub const ORDER: Capabilities = Capabilities(1 << 4);
    /// The capabilities of every fabric whose chains [`run`](crate::run()) runs.
    pub const SOFTWARE: Capabilities = Self::CALLS.and(Self::CONDITIONAL_OPS).and(Self::MASKED_CAS);

    const NAMED: [(Capabilities, &'static str); 5] = [
        (Self::CALLS, "calls"),
        (Self::CONDITIONAL_OPS, "conditional ops"),
        (Self::MASKED_CAS, "masked CAS"),
        (Self::ON_CHIP_WORDS, "on-chip words"),
        (Self::ORDER, "order between chains"),
    ];

    /// Whether all of `others` are among these.
    pub const fn contains(self, others: Capabilities) -> bool {
        self.0 & others.0 == others.0
    }

    /// These, and `others`.
    pub const fn and(self, others: Capabilities) -> Capabilities {
        Capabilities(self.0 | others.0)
    }

    /// These, less `others`.
    pub const fn without(self, others: Capabilities) -> Capabilities {
        Capabilities(self.0 & !others.0)
    }
}

/// `calls, masked CAS`; `none` if there are none.
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
