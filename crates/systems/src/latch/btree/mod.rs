//! A one-sided B-tree from 64-bit keys to 64-bit values, whose nodes are the objects of one store of latched objects.
//!
//! It is a B-link tree (Lehman and Yao, *Efficient Locking for Concurrent Operations on B-Trees*, TODS 1981): each node
//! has a *bound* and a right sibling. Keys from the bound on belong to the sibling, or further right. A client that
//! meets such a key moves right. So a client may use a node that was split since it read the parent, and a descent
//! takes one latch at a time, or none.
//!
//! - `node`: the bytes of a node. `load`: filling an empty tree. [`mutants`]: broken trees.
//!
//! A node is read in the way of the store's scheme ([`Latched::read`]): under the shared mode of a reader/writer latch,
//! under an exclusive latch, or without a latch. All schemes are correct, because no step relies on two nodes at once.
//!
//! **Growth.** The root is always object 0, so that clients need no other place to begin. A full root moves its entries
//! into two new nodes and becomes their parent. A full node of any other level moves its upper half into a new right
//! sibling, and its parent gets an entry later. The client writes new nodes before the node that refers to them. It
//! holds the latch of the node that it splits meanwhile, so that no change of that node can be lost. It takes the
//! latches of the allocator and of the new nodes besides. That cannot end in a deadlock: the holder of the allocator's
//! latch waits for nothing, and nobody else takes the latches of nodes that were just allocated.
//!
//! **Allocation.** Object 1 counts the allocated nodes. This is not the root's task, since each search reads the root.
//! Nodes are never freed. A delete leaves its leaf as it is, even without keys.
//!
//! **Deaths.** A client that dies between two steps leaves a tree in which every key is found:
//! - after the allocation, it leaks the node (two nodes if it split the root);
//! - after the split, the parent lacks an entry, so that searches move right. The next put or successful delete whose
//!   descent moves right there adds the entry.
//!
//! If the client holds a latch when it dies, the node stays latched, unless the store has leases: see [`super`].
//!
//! Differs from the study's artifact, whose B-tree test (`btree.cpp`, `opt_btree.cpp`) stores no keys: its clients read
//! a path of three objects that they draw at random.
//!
//! Invariant: except for the root, a node's level and its least key never change, and its bound only decreases.
//! Invariant: a node is written before any node that refers to it.

pub mod mutants;

mod load;
mod node;

pub use node::{LEVELS_MAX, entries_in};

use super::scheme::Scheme;
use super::{LatchError, Latched};
use farside_remote::Fabric;
use farside_remote::clock::Clock;
use farside_remote::fabric::Ran;
use node::{ALLOCATOR, Entry, Node, ROOT, Right, Shape, allocate, encode};

/// Level of the leaves.
const LEAF: u32 = 0;

/// Handle of a client of one tree. It runs one operation at a time: give each task its own, by [`Btree::another`].
pub struct Btree<F> {
    nodes: Latched<F>,
    /// Handle for new nodes, which are written while a latch is held.
    fresh: Latched<F>,
    shape: Shape,
    /// Content of the node that was read last.
    page: Vec<u8>,
}

/// Error of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BtreeError {
    /// An operation on a node failed.
    Latch {
        /// Error of the operation on the node.
        error: LatchError,
        /// Whether the operation on the tree may have changed it.
        ran: Ran,
    },
    /// A tree does not fit into the store.
    TooSmall {
        /// Number of objects of the store.
        objects: u64,
        /// Bytes of an object's content.
        len: u32,
        /// Least number of bytes of a node.
        len_min: u32,
    },
    /// The tree has as many levels as are possible, and all nodes above one that must be split are full. Nothing was
    /// changed.
    TreeFull {
        /// Number of entries of a full node.
        entries_max: usize,
    },
    /// All objects of the store are allocated. Nothing was changed.
    StoreFull {
        /// Number of objects of the store.
        objects: u64,
    },
    /// Pairs can only be loaded into a tree without keys. Nothing was changed.
    NotEmpty,
    /// The pairs to load are not in the order of their keys, or have a key twice. Nothing was changed.
    NotSorted,
    /// No node can be loaded with this number of entries. Nothing was changed.
    Fill {
        /// Number of entries of a full node.
        entries_max: usize,
    },
    /// A node has content that no client of a tree writes.
    Damaged(&'static str),
}

impl BtreeError {
    /// States whether the operation with this error may have changed the tree.
    pub fn ran(&self) -> Ran {
        match self {
            BtreeError::Latch { ran, .. } => *ran,
            // It may be found after a part of the operation has changed the tree.
            BtreeError::Damaged(_) => Ran::Unknown,
            _ => Ran::No,
        }
    }

    /// Error of an operation on a node. It may be that of an earlier operation of the same handle, which nobody has
    /// awaited: so the error of a read may say that the tree was changed.
    fn of(error: LatchError) -> BtreeError {
        BtreeError::Latch { ran: error.ran(), error }
    }

    /// The same error, of an operation that may have changed the tree before.
    fn after_change(self) -> BtreeError {
        match self {
            BtreeError::Latch { error, .. } => BtreeError::Latch { error, ran: Ran::Unknown },
            other => other,
        }
    }
}

impl std::fmt::Display for BtreeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            BtreeError::Latch { error, .. } => error.fmt(f),
            BtreeError::TooSmall { objects, len, len_min } => write!(
                f,
                "a tree does not fit into {objects} objects of {len} bytes: create a store of at least 2 objects of \
                 at least {len_min} bytes",
            ),
            BtreeError::TreeFull { entries_max } => write!(
                f,
                "the tree is full, and nothing was changed: it has {LEVELS_MAX} levels of nodes of {entries_max} \
                 entries; create a store of longer objects, or use several trees",
            ),
            BtreeError::StoreFull { objects } => write!(
                f,
                "the tree has no node left, and nothing was changed: all {objects} objects of its store are \
                 allocated; create a store of more objects",
            ),
            BtreeError::NotEmpty => f.write_str(
                "pairs can only be loaded into a new tree, and nothing was changed: put them one by one, or create \
                 the store anew",
            ),
            BtreeError::NotSorted => f.write_str(
                "the pairs to load are not in ascending order of distinct keys, and nothing was changed: sort them",
            ),
            BtreeError::Fill { entries_max } => write!(
                f,
                "nodes cannot be loaded with so many entries, and nothing was changed: give 1 to {entries_max}, and \
                 at least 2 if the pairs need several nodes",
            ),
            BtreeError::Damaged(what) => write!(
                f,
                "the tree is damaged ({what}): another program has written to its store; create the store anew",
            ),
        }
    }
}

impl std::error::Error for BtreeError {}

/// A node to which a descent has led. Its content is in the client's page.
#[derive(Clone, Copy)]
struct Found {
    node: u64,
    level: u32,
    /// Whether the tree cannot grow above this node.
    is_full_above: bool,
    /// The last sibling to which the descent moved, for each level. The parent may lack an entry for it.
    moved: [Option<Right>; LEVELS_MAX as usize],
}

/// Outcome of a visit to a latched node.
enum Visit<T> {
    Done(T),
    /// The key belongs to this sibling, or further right.
    Right(Right),
    /// The root has grown, and is no longer of this level.
    Grown,
}

/// Result of an insertion into a node: what remains to be done.
enum Inserted {
    All,
    /// The node was split. Its parent gets an entry for the right half.
    Split(Right),
    /// As `Split`, and the right half is yet to be written. Only a broken tree does that.
    SplitUnwritten(Right, Vec<Entry>),
    /// All: the node is full, and it is not the one to which the descent has led. The nodes above may be others.
    Undecided,
}

impl<F: Fabric + Clock + 'static> Btree<F> {
    /// Creates a handle of the tree in a store. A store that was never written has a tree without keys. Every object of
    /// the store must belong to the tree.
    ///
    /// # Errors
    /// [`BtreeError::TooSmall`].
    pub fn new(nodes: Latched<F>) -> Result<Btree<F>, BtreeError> {
        let (objects, len) = (nodes.spec().objects, nodes.spec().len);
        let shape = Shape::new(objects, len)?;
        let fresh = nodes.another();
        Ok(Btree { nodes, fresh, shape, page: vec![0; len as usize] })
    }

    /// Creates another handle of the same client, for another task.
    pub fn another(&self) -> Btree<F> {
        let (nodes, fresh) = (self.nodes.another(), self.nodes.another());
        Btree { nodes, fresh, shape: self.shape, page: vec![0; self.page.len()] }
    }

    /// The objects of the tree.
    pub fn nodes(&self) -> &Latched<F> {
        &self.nodes
    }

    /// Number of entries of a full node.
    pub fn entries_max(&self) -> usize {
        self.shape.entries_max
    }

    /// Returns the value of a key.
    ///
    /// # Errors
    /// [`BtreeError`].
    pub async fn get(&mut self, key: u64) -> Result<Option<u64>, BtreeError> {
        let found = self.find(key, LEAF).await?;
        Ok(self.node(found.node)?.value(key))
    }

    /// Returns the value of a key by one plain READ of each node, which nothing checks. The result is right only if no
    /// client changes the tree meanwhile. This is the study's baseline: what a lookup costs without synchronization.
    ///
    /// # Errors
    /// [`BtreeError`].
    pub async fn get_unsynchronized(&mut self, key: u64) -> Result<Option<u64>, BtreeError> {
        let (mut number, mut above, mut least) = (ROOT, LEVELS_MAX, None);
        loop {
            let read = self.nodes.read_unsynchronized(number, &mut self.page).await;
            read.map_err(BtreeError::of)?;
            let node = self.node(number)?;
            match node.right {
                // The client that split the node has died before it added the parent's entry.
                Some(right) if right.has(key) && least.is_none_or(|least| right.bound > least) => {
                    (number, least) = (right.node, Some(right.bound));
                }
                _ if node.level == LEAF => return Ok(node.value(key)),
                _ if node.level >= above => return Err(BtreeError::Damaged("a path has too many levels")),
                _ => {
                    above = node.level;
                    (number, least) = (node.child(key, self.shape)?, None);
                }
            }
        }
    }

    /// Stores a value under a key, whether or not the key has one.
    ///
    /// In schemes that do not await the WRITE, the put counts as done only after [`Btree::settle`]: see
    /// [`Latched::with_exclusive`]. If the future is dropped, the value may have been stored.
    ///
    /// # Errors
    /// [`BtreeError`].
    pub async fn put(&mut self, key: u64, value: u64) -> Result<(), BtreeError> {
        // A split that was dropped may have left the allocator latched.
        self.fresh.settle().await.map_err(BtreeError::of)?;
        let found = self.find(key, LEAF).await?;
        let split = self.insert(found, Entry::new(key, value)).await?;
        // From here on, the value is stored.
        if let Some(right) = split {
            self.link(LEAF, right).await.map_err(BtreeError::after_change)?;
        }
        self.mend(found).await.map_err(BtreeError::after_change)
    }

    /// Deletes a key. Returns its value, or `None` if the key had none. As with [`Btree::put`], the delete may count as
    /// done only after [`Btree::settle`].
    ///
    /// # Errors
    /// [`BtreeError`].
    pub async fn delete(&mut self, key: u64) -> Result<Option<u64>, BtreeError> {
        loop {
            let found = self.find(key, LEAF).await?;
            if self.node(found.node)?.value(key).is_none() {
                return Ok(None); // The key had no value when the leaf was read.
            }
            let shape = self.shape;
            let body = async |number: u64, content: &mut [u8]| {
                let node = Node::decode(number, content, shape)?;
                let Ok(place) = node.place(key) else { return Ok(None) };
                let mut entries = node.entries.to_vec();
                let deleted = entries.remove(place);
                let (level, right) = (node.level, node.right);
                encode(content, level, right, &entries);
                Ok(Some(deleted.value()))
            };
            if let Some(deleted) = visit(&mut self.nodes, shape, found, key, body).await? {
                self.mend(found).await.map_err(BtreeError::after_change)?;
                return Ok(deleted);
            }
        }
    }

    /// Returns the pairs from a key on, in the order of their keys, at most `limit`.
    ///
    /// The pairs of one leaf are those of one instant. Pairs of different leaves are not: the scan sees each leaf at a
    /// later instant than the one before. A key that has a value throughout is returned, and no key is returned twice.
    ///
    /// # Errors
    /// [`BtreeError`].
    pub async fn scan(&mut self, from: u64, limit: usize) -> Result<Vec<(u64, u64)>, BtreeError> {
        let mut pairs: Vec<(u64, u64)> = Vec::new();
        if limit == 0 {
            return Ok(pairs);
        }
        let (mut number, mut least) = (self.find(from, LEAF).await?.node, from);
        loop {
            let node = self.node(number)?;
            if node.level != LEAF {
                return Err(BtreeError::Damaged("a leaf has a sibling of another level"));
            }
            let right = node.right;
            for entry in node.entries.iter().filter(|entry| entry.key() >= least) {
                let is_ascending = pairs.last().is_none_or(|(last, _)| *last < entry.key());
                if !is_ascending || right.is_some_and(|right| right.has(entry.key())) {
                    return Err(BtreeError::Damaged("the keys of a leaf are not in order"));
                }
                pairs.push((entry.key(), entry.value()));
                if pairs.len() == limit {
                    return Ok(pairs);
                }
            }
            let Some(right) = right else { return Ok(pairs) };
            if right.bound < least {
                return Err(BtreeError::Damaged("the bounds of a level do not ascend"));
            }
            (number, least) = (right.node, right.bound);
            self.read(number).await?;
            if self.node(number)?.right.is_some_and(|next| next.bound <= least) {
                return Err(BtreeError::Damaged("the bounds of a level do not ascend"));
            }
        }
    }

    /// Waits until all requests of earlier operations of this handle have completed: see [`Latched::settle`].
    ///
    /// # Errors
    /// The first error of an earlier operation, which may have changed the tree before its last request.
    pub async fn settle(&mut self) -> Result<(), BtreeError> {
        let fresh = self.fresh.settle().await;
        self.nodes.settle().await.and(fresh).map_err(|error| BtreeError::of(error).after_change())
    }

    /// Recovers all dead clients of a store with leases: see [`Latched::heal`].
    ///
    /// # Errors
    /// [`BtreeError::Latch`].
    pub async fn heal(&mut self) -> Result<(), BtreeError> {
        self.nodes.heal().await.map_err(BtreeError::of)
    }

    /// The node in the page.
    fn node(&self, number: u64) -> Result<Node<'_>, BtreeError> {
        Node::decode(number, &self.page, self.shape)
    }

    /// Reads a node into the page, in the way of the store's scheme.
    async fn read(&mut self, number: u64) -> Result<(), BtreeError> {
        self.nodes.read(number, &mut self.page).await.map_err(BtreeError::of)
    }

    /// Descends to the node of this level to which a key belongs, and reads the node into the page.
    async fn find(&mut self, key: u64, level: u32) -> Result<Found, BtreeError> {
        self.read(ROOT).await?;
        let root = self.node(ROOT)?;
        if root.level < level {
            return Err(BtreeError::Damaged("the root is below one of its descendants"));
        }
        let mut found = Found {
            node: ROOT,
            level: root.level,
            is_full_above: root.level + 1 == LEVELS_MAX,
            moved: [None; LEVELS_MAX as usize],
        };
        loop {
            let node = self.node(found.node)?;
            if node.level != found.level {
                return Err(BtreeError::Damaged("a node has a child or a sibling of a wrong level"));
            }
            let next = match node.right {
                Some(right) if right.has(key) && !mutants::SEARCH_STAYS.is_on() => {
                    let last = found.moved[found.level as usize].replace(right);
                    if last.is_some_and(|last| last.bound >= right.bound) {
                        return Err(BtreeError::Damaged("the bounds of a level do not ascend"));
                    }
                    right.node
                }
                _ if found.level == level => return Ok(found),
                _ => {
                    let (child, is_full) =
                        (node.child(key, self.shape)?, node.entries.len() == self.shape.entries_max);
                    found.level -= 1;
                    found.is_full_above &= is_full;
                    child
                }
            };
            found.node = next;
            self.read(next).await?;
        }
    }

    /// Inserts an entry into the node to which its key belongs, or replaces the value there. `found` is the node to
    /// which a descent has led. If the node was split, returns its right half, for which the parent lacks an entry.
    async fn insert(&mut self, found: Found, entry: Entry) -> Result<Option<Right>, BtreeError> {
        let (shape, mut found) = (self.shape, found);
        loop {
            let Btree { nodes, fresh, page, .. } = self;
            let body = async |number: u64, content: &mut [u8]| {
                if mutants::STALE_LEAF.is_on() && found.level == LEAF && number == found.node {
                    content.copy_from_slice(page);
                }
                insert_into(fresh, shape, (number, content), &found, entry).await
            };
            match visit(nodes, shape, found, entry.key(), body).await? {
                Some(Inserted::All) => return Ok(None),
                Some(Inserted::Split(right)) => {
                    // The parent must not refer to the right half before the left half refers to it.
                    self.nodes.settle().await.map_err(BtreeError::of)?;
                    return Ok(Some(right));
                }
                Some(Inserted::SplitUnwritten(right, entries)) => {
                    write_node(fresh, right.node, found.level, None, &entries).await?;
                    return Ok(Some(right));
                }
                Some(Inserted::Undecided) | None => found = self.find(entry.key(), found.level).await?,
            }
        }
    }

    /// Adds an entry for the right half of a split node to the parent, unless it has one. The tree is right without the
    /// entry, so that a full or busy tree is no error.
    async fn link(&mut self, level: u32, right: Right) -> Result<(), BtreeError> {
        let (mut level, mut right) = (level, right);
        loop {
            level += 1;
            let linked = self.link_once(level, right).await;
            match linked {
                Ok(Some(next)) => right = next,
                Ok(None)
                | Err(
                    BtreeError::TreeFull { .. }
                    | BtreeError::StoreFull { .. }
                    | BtreeError::Latch { error: LatchError::Busy, .. },
                ) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    /// Adds an entry to the node of this level to which its key belongs, unless the node has it.
    async fn link_once(&mut self, level: u32, right: Right) -> Result<Option<Right>, BtreeError> {
        let found = self.find(right.bound, level).await?;
        if self.node(found.node)?.value(right.bound) == Some(right.node) {
            return Ok(None);
        }
        self.insert(found, Entry::new(right.bound, right.node)).await
    }

    /// Adds the entries that parents lack if a descent has moved right. Usually the client that has split the node is
    /// about to add the entry; if that client has died, nobody else does.
    async fn mend(&mut self, found: Found) -> Result<(), BtreeError> {
        for (level, moved) in (0..).zip(found.moved) {
            if let Some(right) = moved {
                self.link(level, right).await?;
            }
        }
        Ok(())
    }
}

/// Calls `body` with the latched node to which a key belongs, starting with the node `found`. Returns `None` if the
/// root has grown meanwhile.
async fn visit<F: Fabric + Clock + 'static, T>(
    nodes: &mut Latched<F>,
    shape: Shape,
    found: Found,
    key: u64,
    mut body: impl AsyncFnMut(u64, &mut [u8]) -> Result<T, BtreeError>,
) -> Result<Option<T>, BtreeError> {
    let (mut number, mut least) = (found.node, None);
    loop {
        let visit = async |content: &mut [u8]| {
            let node = Node::decode(number, content, shape)?;
            if node.level != found.level {
                let is_grown = number == ROOT && node.level > found.level;
                let damaged = BtreeError::Damaged("a node has another level than before");
                return if is_grown { Ok(Visit::Grown) } else { Err(damaged) };
            }
            match node.right {
                Some(right) if right.has(key) && !mutants::PUT_STAYS.is_on() => Ok(Visit::Right(right)),
                _ => body(number, content).await.map(Visit::Done),
            }
        };
        match nodes.with_exclusive(number, visit).await.map_err(BtreeError::of)?? {
            Visit::Done(done) => return Ok(Some(done)),
            Visit::Grown => return Ok(None),
            Visit::Right(right) if least.is_none_or(|least| right.bound > least) => {
                (number, least) = (right.node, Some(right.bound));
            }
            Visit::Right(_) => return Err(BtreeError::Damaged("the bounds of a level do not ascend")),
        }
    }
}

/// Inserts an entry into the latched node of this number and content, and splits the node if it is full. `found` is the
/// node to which a descent has led.
async fn insert_into<F: Fabric + Clock + 'static>(
    fresh: &mut Latched<F>,
    shape: Shape,
    (number, content): (u64, &mut [u8]),
    found: &Found,
    entry: Entry,
) -> Result<Inserted, BtreeError> {
    let node = Node::decode(number, content, shape)?;
    let (level, right, mut entries) = (node.level, node.right, node.entries.to_vec());
    match node.place(entry.key()) {
        Ok(place) => entries[place] = entry,
        Err(place) => entries.insert(place, entry),
    }
    if entries.len() <= shape.entries_max {
        encode(content, level, right, &entries);
        return Ok(Inserted::All);
    }
    if found.is_full_above && number != found.node {
        return Ok(Inserted::Undecided);
    }
    if found.is_full_above {
        return Err(BtreeError::TreeFull { entries_max: shape.entries_max });
    }
    let above = entries.split_off(entries.len() / 2);
    let Some(bound) = above.first().map(|first| first.key()) else {
        return Err(BtreeError::Damaged("a full node has no entries"));
    };
    let count = if number == ROOT { 2 } else { 1 };
    let first = fresh.with_exclusive(ALLOCATOR, async |content| allocate(content, count, shape)).await;
    let first = first.map_err(BtreeError::of)??;
    if number == ROOT {
        let halves = [first, first + 1];
        let sibling = Right { node: halves[1], bound };
        write_node(fresh, halves[1], level, None, &above).await?;
        write_node(fresh, halves[0], level, Some(sibling), &entries).await?;
        encode(content, level + 1, None, &[Entry::new(0, halves[0]), Entry::new(bound, halves[1])]);
        return Ok(Inserted::All);
    }
    let sibling = Right { node: first, bound };
    if mutants::LEFT_FIRST.is_on() {
        encode(content, level, Some(sibling), &entries);
        return Ok(Inserted::SplitUnwritten(sibling, above));
    }
    write_node(fresh, first, level, right, &above).await?;
    encode(content, level, Some(sibling), &entries);
    Ok(Inserted::Split(sibling))
}

/// Writes a node that no other node refers to, and waits until it is written.
async fn write_node<F: Fabric + Clock + 'static>(
    fresh: &mut Latched<F>,
    number: u64,
    level: u32,
    right: Option<Right>,
    entries: &[Entry],
) -> Result<(), BtreeError> {
    let written = fresh.with_exclusive(number, async |content| encode(content, level, right, entries)).await;
    written.map_err(BtreeError::of)?;
    fresh.settle().await.map_err(BtreeError::of)
}

/// Length of the content of objects that take at most `bytes` bytes with their latches and versions.
///
/// # Errors
/// No object of this scheme is as short as that. Returns the least number of bytes.
pub fn node_len(scheme: Scheme, bytes: u32) -> Result<u32, u32> {
    super::layout::len_of_object(scheme, bytes)
}
