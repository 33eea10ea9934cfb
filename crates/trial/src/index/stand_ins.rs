//! Other systems in the place of an index, by which tests check the family of indexes itself:
//! - the B-tree on latched objects, with leases, on one node;
//! - PRISM-KV on up to three nodes, whose scans visit all keys and sort them.
//!
//! Neither is an index that users can create: [`crate::System::all`] has none of them.

use super::{Opened, Setting};
use crate::flight::Tracked;
use crate::latch::drawn_backoff;
use crate::systems::System;
use crate::{Choice, Drawn};
use farside_remote::Capabilities;
use farside_remote::control::Store;
use farside_remote::fabric::Ran;
use farside_sim::random::Random;
use farside_sim::world::MICROS;
use farside_systems::index::{Index, IndexError, Keys};
use farside_systems::kv::{AnyKv, Kv as _, KvError};
use farside_systems::latch::btree::mutants as btrees;
use farside_systems::latch::btree::{Btree, BtreeError};
use farside_systems::latch::system::LatchKind;
use farside_systems::latch::{self, LatchError, Latching, Scheme};
use farside_systems::lease::LeaseError;
use farside_systems::store::{Members, StoreError};
use farside_systems::system::{Nodes, Options, Sizing, System as _};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

/// The systems that stand in for an index: the B-tree and PRISM-KV.
pub fn stand_ins() -> [System; 2] {
    let tree = System::in_place_of_an_index::<Tree>(
        "btree-index",
        latch::KIND,
        (Nodes::One, Capabilities::NONE),
        &Scheme::ALL,
        btrees::ALL,
    );
    let needs = Capabilities::CONDITIONAL_OPS.and(Capabilities::MASKED_CAS);
    let table =
        System::in_place_of_an_index::<Table>("kv-index", "prism-kv", (Nodes::Shards, needs), &[], &[]);
    [tree, table]
}

/// Time for which a tree's clients try to take a latch. A dead client's latch is free after its lease and its recovery.
const PATIENCE: Duration = Duration::from_millis(500);
/// Bytes of a node of a tree without entries, and of an entry.
const HEAD: usize = 24;
const ENTRY: usize = 16;

/// A B-tree. Its keys are numbers, and its values are words.
struct Tree {
    tree: Btree<Tracked>,
    found: [u8; 8],
}

impl Opened for Tree {
    const MEMBERS_MAX: u64 = 1;
    const HAS_STRINGS: bool = false;
    const ADDS: bool = false;
    const GOES_ON: bool = false;
    const IS_KEPT: bool = true;
    const MEMBER_MIB: [u64; 2] = [8, 8];

    fn drawn(_kind: &str, drawn: &Drawn, random: &Random, _keys: Keys) -> Setting {
        let can_expire = |scheme: &Scheme| !scheme.has_shared_mode();
        let schemes: Vec<Scheme> = Scheme::ALL.iter().map(|(_, scheme)| *scheme).filter(can_expire).collect();
        let scheme = schemes[random.below(schemes.len() as u64) as usize];
        let scheme = drawn.scheme.filter(can_expire).unwrap_or(scheme);
        let (entries, us) = (random.between(2, 4), random.between(5_000, 20_000));
        let objects = [48, 200, 1_000][random.below(3) as usize];
        let backoff = drawn_backoff(random, 8 * MICROS);
        Setting {
            sizing: Sizing {
                items: Some(objects),
                value_len: HEAD + ENTRY * entries as usize,
                latching: Latching { scheme: Some(scheme), ..Latching::NONE },
                lease: Some(Duration::from_micros(us)),
                ..Sizing::default()
            },
            options: Options { backoff: Some(backoff), patience: Some(PATIENCE), ..Options::NONE },
            survives_deaths: true,
            has_leases: true,
            relaxed: Some(false),
            choices: vec![
                Choice::new("scheme", scheme.name(), format!("scheme {scheme}")),
                Choice::new("objects", objects, format!("objects {objects}")),
                Choice::new("entries", entries, format!("entries of a node {entries}")),
                Choice::new("lease_us", us, format!("lease {us} us")),
            ],
        }
    }

    async fn open(
        fabric: Tracked,
        _nodes: u32,
        members: &Members,
        options: &Options,
    ) -> Result<Tree, StoreError> {
        let tree = Btree::new(LatchKind::open(fabric, members, options).await?);
        let tree = tree.map_err(|error| StoreError::Gone(error.to_string()))?;
        Ok(Tree { tree, found: [0; 8] })
    }

    async fn another(&self) -> Result<Tree, StoreError> {
        Ok(Tree { tree: self.tree.another(), found: [0; 8] })
    }

    async fn heal(&mut self) -> Result<(), IndexError> {
        self.tree.heal().await.map_err(of_tree)
    }

    fn held(store: &Store, load: impl Fn(u64) -> u64) -> Result<Vec<(u64, u64)>, String> {
        latch::held(store, load)
    }
}

impl Index for Tree {
    fn kind(&self) -> &'static str {
        latch::KIND
    }

    fn keys(&self) -> Keys {
        Keys::Numbers
    }

    fn value_max(&self) -> usize {
        self.found.len()
    }

    async fn get(&mut self, key: &[u8]) -> Result<Option<&[u8]>, IndexError> {
        let found = self.tree.get(word(key)?.swap_bytes()).await.map_err(of_tree)?;
        Ok(found.map(|found| {
            self.found = found.to_le_bytes();
            &self.found[..]
        }))
    }

    async fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), IndexError> {
        self.tree.put(word(key)?.swap_bytes(), word(value)?).await.map_err(of_tree)?;
        self.settled().await
    }

    async fn put_if_absent(&mut self, _: &[u8], _: &[u8]) -> Result<bool, IndexError> {
        unreachable!("a tree does not offer it, and no trial draws it")
    }

    async fn delete(&mut self, key: &[u8]) -> Result<bool, IndexError> {
        let deleted = self.tree.delete(word(key)?.swap_bytes()).await.map_err(of_tree)?;
        self.settled().await?;
        Ok(deleted.is_some())
    }

    async fn scan(
        &mut self,
        from: &[u8],
        limit: usize,
        mut visit: impl FnMut(&[u8], &[u8]),
    ) -> Result<usize, IndexError> {
        let pairs = self.tree.scan(word(from)?.swap_bytes(), limit).await.map_err(of_tree)?;
        pairs.iter().for_each(|(key, value)| visit(&key.to_be_bytes(), &value.to_le_bytes()));
        Ok(pairs.len())
    }

    fn keeper<'f>(&self) -> Pin<Box<dyn Future<Output = ()> + 'f>>
    where
        Self: 'f,
    {
        let keeper = self.tree.nodes().keeper();
        Box::pin(async move { drop(keeper.await) })
    }
}

impl Tree {
    /// Waits until the operation's requests have completed. Else its latch passes on when the session ends, with or
    /// without the change.
    async fn settled(&mut self) -> Result<(), IndexError> {
        self.tree.settle().await.map_err(of_tree)
    }
}

/// The word that these bytes are, in little-endian order.
fn word(bytes: &[u8]) -> Result<u64, IndexError> {
    let wrong = IndexError::KeyLength { len: bytes.len(), keys: Keys::Numbers };
    bytes.try_into().map(u64::from_le_bytes).map_err(|_| wrong)
}

fn of_tree(error: BtreeError) -> IndexError {
    match error {
        BtreeError::Latch { error, ran } => match error {
            LatchError::Busy | LatchError::NoLane if ran == Ran::No => IndexError::Busy,
            LatchError::Fabric(error) => IndexError::Fabric(error.map_ran(|_of_request| ran)),
            LatchError::Refused(status) => IndexError::Refused { status, ran },
            LatchError::Damaged(what) => IndexError::Damaged(what),
            LatchError::NoSuchObject { .. } | LatchError::Length(_) => {
                IndexError::Damaged("a tree has used an object that its store lacks")
            }
            LatchError::Lease(LeaseError::Exhausted) => IndexError::Lease(LeaseError::Exhausted),
            _ => IndexError::NotKept { ran },
        },
        BtreeError::TreeFull { .. } | BtreeError::StoreFull { .. } => IndexError::Busy,
        BtreeError::Damaged(what) => IndexError::Damaged(what),
        _ => IndexError::Damaged("a tree has reported an error that it must not report"),
    }
}

/// A key-value store whose scans visit all keys, and sort them.
struct Table {
    kv: AnyKv<Tracked>,
    fabric: Tracked,
    nodes: u32,
    members: Members,
    options: Options,
    found: Vec<u8>,
    /// Number of keys that the scans of all handles have visited.
    visited: Rc<Cell<u64>>,
}

impl Opened for Table {
    const MEMBERS_MAX: u64 = 3;
    const HAS_STRINGS: bool = true;
    const ADDS: bool = true;
    const GOES_ON: bool = true;
    const IS_KEPT: bool = false;
    // Each size class of buffers takes a segment.
    const MEMBER_MIB: [u64; 2] = [28, 4];

    fn drawn(_kind: &str, drawn: &Drawn, random: &Random, _keys: Keys) -> Setting {
        let slot_cache = [0, 2, 1_000][random.below(3) as usize];
        let items = 4 * drawn.keys + 200;
        Setting {
            sizing: Sizing { items: Some(items), key_len: 64, value_len: 200, ..Sizing::default() },
            options: Options { slot_cache, ..Options::NONE },
            survives_deaths: true,
            has_leases: false,
            relaxed: None,
            choices: vec![Choice::new("slot_cache", slot_cache, format!("slot cache {slot_cache}"))],
        }
    }

    async fn open(
        fabric: Tracked,
        nodes: u32,
        members: &Members,
        options: &Options,
    ) -> Result<Table, StoreError> {
        let kv = AnyKv::of(fabric.clone(), nodes, members, options).await?;
        let (members, options, visited) = (members.clone(), *options, Rc::default());
        Ok(Table { kv, fabric, nodes, members, options, found: Vec::new(), visited })
    }

    async fn another(&self) -> Result<Table, StoreError> {
        let another = Table::open(self.fabric.clone(), self.nodes, &self.members, &self.options).await?;
        Ok(Table { visited: Rc::clone(&self.visited), ..another })
    }

    async fn heal(&mut self) -> Result<(), IndexError> {
        Ok(())
    }
}

impl Index for Table {
    fn kind(&self) -> &'static str {
        self.kv.kind()
    }

    fn keys(&self) -> Keys {
        Keys::Strings
    }

    fn value_max(&self) -> usize {
        500
    }

    async fn get(&mut self, key: &[u8]) -> Result<Option<&[u8]>, IndexError> {
        let Some(item) = self.kv.get(key).await.map_err(of_table)? else { return Ok(None) };
        self.found = item.value.to_vec();
        Ok(Some(&self.found))
    }

    async fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), IndexError> {
        self.kv.put(key, value).await.map_err(of_table)
    }

    async fn put_if_absent(&mut self, key: &[u8], value: &[u8]) -> Result<bool, IndexError> {
        self.kv.put_if_absent(key, value).await.map_err(of_table)
    }

    async fn delete(&mut self, key: &[u8]) -> Result<bool, IndexError> {
        self.kv.delete(key).await.map_err(of_table)
    }

    async fn scan(
        &mut self,
        from: &[u8],
        limit: usize,
        mut visit: impl FnMut(&[u8], &[u8]),
    ) -> Result<usize, IndexError> {
        let (mut cursor, mut all) = (self.kv.first().map_err(of_table)?, BTreeMap::new());
        let mut keep = |key: &[u8], value: &[u8]| drop(all.insert(key.to_vec(), value.to_vec()));
        while self.kv.next(&mut cursor, |key, item| keep(key, item.value)).await.map_err(of_table)? {}
        let from = all.range(from.to_vec()..).take(limit);
        let count = from.map(|(key, value)| visit(key, value)).count();
        self.visited.set(self.visited.get() + count as u64);
        Ok(count)
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![("visited", self.visited.get())]
    }
}

fn of_table(error: KvError) -> IndexError {
    match error {
        KvError::OutOfMemory => IndexError::OutOfMemory,
        KvError::TableFull(_) | KvError::NotMoved | KvError::Rebuilt => IndexError::Busy,
        KvError::Refused(status) => IndexError::Refused { status, ran: Ran::No },
        KvError::Damaged(what) => IndexError::Damaged(what),
        KvError::Store(error) => error.into(),
        KvError::Fabric(error) => IndexError::Fabric(error),
        _ => IndexError::Damaged("a table has reported an error that it must not report"),
    }
}
