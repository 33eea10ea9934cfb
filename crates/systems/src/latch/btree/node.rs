//! The bytes of a node, and the checks of what a client has read.
//!
//! ```text
//! object 0 | the root
//! object 1 | allocated u64 | 0 ...
//! others   | other nodes
//! node     | level u32 | count u32 | right u64 | bound u64 | entry x count |
//! entry    | key u64 | value u64, or number of the child |
//! ```
//!
//! All are little-endian. A node that was never written is an empty leaf. If `right` is 0, the node is the last of its
//! level, and has no bound.
//!
//! Any client may have written anything. So a client checks each number of a node before it uses the number. It does
//! not check the order of the keys: in a node without order, it may miss a key.

use super::BtreeError;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Largest number of levels.
pub const LEVELS_MAX: u32 = 3;
/// Number of the root's object.
pub(super) const ROOT: u64 = 0;
/// Number of the object that counts the allocated nodes.
pub(super) const ALLOCATOR: u64 = 1;
/// Number of the first node that can be allocated.
pub(super) const FIRST: u64 = 2;
/// Least number of entries for which a node must have space.
const ENTRIES_MIN: usize = 2;

/// A node's key, with its value or the number of its child.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Entry {
    key: U64,
    value: U64,
}

impl Entry {
    pub(super) const fn new(key: u64, value: u64) -> Entry {
        Entry { key: U64::new(key), value: U64::new(value) }
    }

    pub(super) fn key(self) -> u64 {
        self.key.get()
    }

    pub(super) fn value(self) -> u64 {
        self.value.get()
    }
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Head {
    level: U32,
    count: U32,
    right: U64,
    bound: U64,
}

/// Size of a node's head in bytes.
const HEAD: usize = size_of::<Head>();

/// Number of entries for which a node has space whose object has a content of `len` bytes.
pub fn entries_in(len: u32) -> usize {
    (len as usize).saturating_sub(HEAD) / size_of::<Entry>()
}

/// Shape of a tree's nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// Number of objects of the store.
    pub(super) objects: u64,
    /// Number of entries of a full node.
    pub(super) entries_max: usize,
}

impl Shape {
    /// Returns the shape of the nodes of a store of `objects` objects of `len` bytes.
    ///
    /// # Errors
    /// A tree does not fit into such a store.
    pub(super) fn new(objects: u64, len: u32) -> Result<Shape, BtreeError> {
        let entries_max = entries_in(len);
        if objects < FIRST || entries_max < ENTRIES_MIN {
            let len_min = (HEAD + ENTRIES_MIN * size_of::<Entry>()) as u32;
            return Err(BtreeError::TooSmall { objects, len, len_min });
        }
        Ok(Shape { objects, entries_max })
    }

    /// Whether this is the number of an object that can be a node other than the root.
    fn is_node(self, number: u64) -> bool {
        (FIRST..self.objects).contains(&number)
    }
}

/// Right sibling of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Right {
    /// Number of the sibling.
    pub(super) node: u64,
    /// Least key that belongs to the sibling or to a node on its right.
    pub(super) bound: u64,
}

impl Right {
    /// Whether a key belongs to the sibling or to a node on its right.
    pub(super) fn has(self, key: u64) -> bool {
        key >= self.bound
    }
}

/// A node as a client has read it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Node<'a> {
    pub(super) level: u32,
    pub(super) right: Option<Right>,
    pub(super) entries: &'a [Entry],
}

impl<'a> Node<'a> {
    /// Reads the node of this number from an object's content.
    ///
    /// # Errors
    /// The content is that of no such node.
    pub(super) fn decode(number: u64, content: &'a [u8], shape: Shape) -> Result<Node<'a>, BtreeError> {
        let damaged = |what| Err(BtreeError::Damaged(what));
        let Ok((head, rest)) = Head::ref_from_prefix(content) else {
            return damaged("a node is shorter than its head");
        };
        let (level, count) = (head.level.get(), head.count.get() as usize);
        if level >= LEVELS_MAX {
            return damaged("a node has an impossible level");
        }
        if count > shape.entries_max || (level > 0 && count == 0) {
            return damaged("a node has an impossible number of entries");
        }
        let right = match head.right.get() {
            0 => None,
            node if number != ROOT && node != number && shape.is_node(node) => {
                Some(Right { node, bound: head.bound.get() })
            }
            _ => return damaged("a node has an impossible sibling"),
        };
        match <[Entry]>::ref_from_prefix_with_elems(rest, count) {
            Ok((entries, _)) => Ok(Node { level, right, entries }),
            Err(_) => damaged("a node is shorter than its entries"),
        }
    }

    /// Place of a key, or, as the error, the place where the key belongs.
    pub(super) fn place(&self, key: u64) -> Result<usize, usize> {
        self.entries.binary_search_by_key(&key, |entry| entry.key())
    }

    /// Value of a key.
    pub(super) fn value(&self, key: u64) -> Option<u64> {
        self.place(key).ok().and_then(|place| self.entries.get(place)).map(|entry| entry.value())
    }

    /// Number of the child to which a key belongs.
    ///
    /// # Errors
    /// The node has no such child.
    pub(super) fn child(&self, key: u64, shape: Shape) -> Result<u64, BtreeError> {
        let place = self.place(key).map_or_else(|beyond| beyond.checked_sub(1), Some);
        let child = place.and_then(|place| self.entries.get(place)).map(|entry| entry.value());
        match child {
            Some(child) if shape.is_node(child) => Ok(child),
            _ => Err(BtreeError::Damaged("a node lacks the child of a key")),
        }
    }
}

/// Writes a node into an object's content. The bytes behind the entries stay as they are: nobody reads them.
///
/// # Panics
/// If the node does not fit. The caller has compared its number of entries with [`Shape::entries_max`].
pub(super) fn encode(content: &mut [u8], level: u32, right: Option<Right>, entries: &[Entry]) {
    let (node, bound) = right.map_or((0, 0), |right| (right.node, right.bound));
    let head = Head {
        level: U32::new(level),
        count: U32::new(entries.len() as u32),
        right: U64::new(node),
        bound: U64::new(bound),
    };
    content[..HEAD].copy_from_slice(head.as_bytes());
    content[HEAD..][..size_of_val(entries)].copy_from_slice(entries.as_bytes());
}

/// Takes the numbers of `count` new nodes from the content of the allocator's object. Returns the first number.
///
/// # Errors
/// The store has fewer objects left. The content is then unchanged.
pub(super) fn allocate(content: &mut [u8], count: u64, shape: Shape) -> Result<u64, BtreeError> {
    let Some(word) = content.first_chunk_mut::<8>() else {
        return Err(BtreeError::Damaged("the object that counts nodes is too short"));
    };
    let allocated = u64::from_le_bytes(*word);
    let left = (shape.objects - FIRST)
        .checked_sub(allocated)
        .ok_or(BtreeError::Damaged("more nodes are allocated than the store has"))?;
    if left < count {
        return Err(BtreeError::StoreFull { objects: shape.objects });
    }
    *word = (allocated + count).to_le_bytes();
    Ok(FIRST + allocated)
}
