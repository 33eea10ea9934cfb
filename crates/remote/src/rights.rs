//! The rights that a key has to its region.
//!
//! Invariant: a key that is not the region's has no rights, so a wrong key and a missing right are refused alike.

use serde::de::{Deserialize, Deserializer};
use serde::ser::{Serialize, Serializer};
use std::fmt;
use std::ops::BitOr;

/// A set of rights. Its JSON form is a list of words: `["read", "write"]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Rights(u8);

/// One right, as a word in JSON and in messages.
#[derive(Clone, Copy, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
enum Word {
    Read,
    Write,
    Atomic,
    Allocate,
}

impl Word {
    const ALL: [Word; 4] = [Word::Read, Word::Write, Word::Atomic, Word::Allocate];

    const fn right(self) -> Rights {
        match self {
            Word::Read => Rights::READ,
            Word::Write => Rights::WRITE,
            Word::Atomic => Rights::ATOMIC,
            Word::Allocate => Rights::ALLOCATE,
        }
    }
}

impl Rights {
    /// The empty set of rights, which a wrong key has.
    pub const NONE: Rights = Rights(0);
    /// The right to read bytes: for READ, for following pointers, and for an op whose data lies in the node's memory.
    pub const READ: Rights = Rights(1 << 0);
    /// The right to overwrite bytes: for WRITE, and for redirecting an output into the node's memory.
    pub const WRITE: Rights = Rights(1 << 1);
    /// The right to exchange a word, and thus to read its old value: for CAS and FETCH-ADD.
    pub const ATOMIC: Rights = Rights(1 << 2);
    /// The right to allocate and fill buffers, and to retire them.
    pub const ALLOCATE: Rights = Rights(1 << 3);
    /// All rights, which the region's own secret gives.
    pub const ALL: Rights = Rights(0b1111);

    /// Whether this set contains all of `others`.
    #[inline(always)]
    pub const fn contains(self, others: Rights) -> bool {
        self.0 & others.0 == others.0
    }

    /// Returns the intersection of both sets.
    #[inline(always)]
    pub const fn and(self, others: Rights) -> Rights {
        Rights(self.0 & others.0)
    }

    fn words(self) -> impl Iterator<Item = Word> {
        Word::ALL.into_iter().filter(move |word| self.contains(word.right()))
    }
}

impl BitOr for Rights {
    type Output = Rights;

    #[inline(always)]
    fn bitor(self, others: Rights) -> Rights {
        Rights(self.0 | others.0)
    }
}

impl FromIterator<Rights> for Rights {
    fn from_iter<I: IntoIterator<Item = Rights>>(rights: I) -> Rights {
        rights.into_iter().fold(Rights::NONE, Rights::bitor)
    }
}

/// Prints for example `read, write`; the empty set prints `none`.
impl fmt::Display for Rights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Rights::NONE {
            return f.write_str("none");
        }
        for (index, word) in self.words().enumerate() {
            f.write_str(if index > 0 { ", " } else { "" })?;
            word.serialize(&mut *f)?;
        }
        Ok(())
    }
}

impl Serialize for Rights {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.words())
    }
}

impl<'de> Deserialize<'de> for Rights {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Rights, D::Error> {
        let words = Vec::<Word>::deserialize(deserializer)?;
        Ok(words.into_iter().map(Word::right).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::de::value::{Error, SeqDeserializer};

    /// All 16 sets of rights.
    fn sets() -> impl Iterator<Item = Rights> {
        (0..=Rights::ALL.0).map(Rights)
    }

    #[test]
    fn a_set_contains_another_if_it_has_each_of_its_rights() {
        for set in sets() {
            assert!(set.contains(Rights::NONE) && Rights::ALL.contains(set));
            for other in sets() {
                let each = Word::ALL
                    .into_iter()
                    .map(Word::right)
                    .all(|right| !other.contains(right) || set.contains(right));
                assert_eq!(set.contains(other), each, "{set} and {other}");
                assert!((set | other).contains(other));
                assert_eq!(set.and(other) == other, each);
            }
        }
    }

    #[test]
    fn rights_parse_from_words_and_unknown_words_are_named() {
        let rights = |words: &[&'static str]| {
            Rights::deserialize(SeqDeserializer::<_, Error>::new(words.iter().copied()))
        };
        for set in sets() {
            let text = set.to_string();
            let words: Vec<&'static str> = ["read", "write", "atomic", "allocate"]
                .into_iter()
                .filter(|word| text.split(", ").any(|shown| shown == *word))
                .collect();
            assert_eq!(rights(&words), Ok(set), "{text}");
        }
        assert_eq!(rights(&["read", "read"]), Ok(Rights::READ));
        let refused = rights(&["read", "all"]).expect_err("no such right").to_string();
        assert!(refused.contains("`all`") && refused.contains("`allocate`"), "{refused}");
    }

    #[test]
    fn rights_are_shown_as_words() {
        assert_eq!(Rights::NONE.to_string(), "none");
        assert_eq!((Rights::WRITE | Rights::READ).to_string(), "read, write");
        assert_eq!(Rights::ALL.to_string(), "read, write, atomic, allocate");
    }
}
