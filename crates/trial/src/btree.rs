//! The B-tree on latched objects. Each key is a register, and every lookup is checked, whether a client makes it by a
//! GET or by a scan.
//!
//! Nodes have two to four entries, and few objects are left over, so that nodes and the root are split all the time,
//! and trees become full. A few keys have many operations; many keys have few, and make the nodes split. The tree's
//! keys follow from the numbers of the keys in the history, and are spread over all 64 bits.
//!
//! A scan is a lookup of each key of its range, at an instant within the scan. So the answer for one key is recorded as
//! that of a GET, and the checker of registers finds a key that was missed. That the pairs ascend, so that no key
//! occurs twice, and that their values were put, is checked here.
//!
//! Clients, stores and deaths are as in [`crate::latch`].

use crate::family::{Failure, FailureKind, Family, Seat};
use crate::flight::{Phases, Tracked};
use crate::latch::{
    HEAL_ONE_IN, Opened, PHASES, Shared, Stores, Wrong, drawn_backoff, drawn_lease, drawn_spec, options_of,
};
use crate::systems::System;
use crate::values::{mixed, of_word, word};
use crate::{Choice, Drawn, Scene};
use farside_remote::NodeId;
use farside_sim::history::register::{Ask, Outcome, Value};
use farside_sim::linearizable::{self, Limits};
use farside_sim::node::Node;
use farside_sim::random::Random;
use farside_sim::world::MICROS;
use farside_systems::latch::btree::{Btree, BtreeError};
use farside_systems::latch::{LatchError, Spec};
use farside_systems::system::Backoff;
use std::collections::BTreeMap;

/// Name of the system in flags and reports.
pub(crate) const NAME: &str = "btree";

/// Bytes of a node without entries, and of an entry.
const HEAD: u32 = 24;
const ENTRY: u32 = 16;
/// Number of keys with few operations, for each key with many.
const COLD: u64 = 8;
/// Length of values in the history. In the tree, they are words.
const VALUE_LEN: u32 = 8;

/// The system of B-trees under trial.
pub(crate) struct Trial {
    spec: Spec,
    backoff: Backoff,
    entries: u32,
    /// Numbers of the keys in the history, by the tree's keys.
    keys: BTreeMap<u64, u64>,
    hot: u64,
    stores: Stores,
}

/// A task's handle of a client of a tree.
pub(crate) struct Client {
    opened: Opened,
    tree: Btree<Tracked>,
}

/// The tree's key for the number of a key in the history.
fn key_of(number: u64) -> u64 {
    match number {
        // The ends of the range are keys like all others.
        1 => 0,
        2 => u64::MAX,
        _ => mixed(number + 1),
    }
}

impl Family for Trial {
    type Ask = Ask;
    type Client = Client;
    type Shared = Shared;
    type Checker = linearizable::Registers;

    fn drawn(_system: System, drawn: &Drawn, random: &Random) -> Trial {
        let entries = random.between(2, 4) as u32;
        let objects = [4, 12, 48, 200][random.below(4) as usize];
        let spec = drawn_spec(random, drawn.scheme, objects, &[HEAD + ENTRY * entries]);
        // As for the family of latched objects, and twice as many, since a tree has two handles.
        let lease = drawn_lease(random, drawn, spec.scheme, 8 * drawn.tasks as u16 + 8);
        let hot = drawn.keys.min(8);
        let keys = (0..hot + COLD * hot).map(|number| (key_of(number), number)).collect();
        let backoff = drawn_backoff(random, 8 * MICROS);
        Trial { spec: Spec { lease, ..spec }, backoff, entries, keys, hot, stores: Stores::default() }
    }

    fn is_owned(&self) -> bool {
        true
    }

    fn relaxed(&self) -> Option<bool> {
        Some(self.spec.relaxed)
    }

    fn options(&self) -> Vec<Choice> {
        let mut options = options_of(&self.spec, self.backoff);
        options.push(Choice::new("entries", self.entries, format!("entries of a node {}", self.entries)));
        options
    }

    fn parameters(&self) -> String {
        serde_json::to_string(&self.spec).expect("plain data")
    }

    /// In a store with leases, an operation does not end with its session: others may redo it.
    fn is_one_sided(&self) -> bool {
        self.spec.lease.is_none()
    }

    fn long_pause_one_in(&self, random: &Random) -> u64 {
        if self.spec.lease.is_some() { random.between(2, 4) } else { 0 }
    }

    fn phases(_system: System) -> &'static Phases {
        &PHASES
    }

    fn checker(&self) -> linearizable::Registers {
        linearizable::Registers(Limits::default())
    }

    async fn open(&self, seat: Seat<'_, Trial>, node: NodeId, name: &str) -> Result<Client, Failure> {
        let options = (self.backoff, self.spec.lease.is_some());
        let (opened, latched) = self.stores.open(&seat, node, name, options).await?;
        Ok(Client { opened, tree: Btree::new(latched)? })
    }

    async fn leave(&self, scene: &Scene, shared: &Shared) {
        shared.leave(scene).await;
    }

    fn draw(&self, scene: &Scene, _client: &mut Client) -> (u64, Ask) {
        let random = scene.world.random();
        let number = match random.one_in(2) {
            true => random.below(self.hot),
            false => random.below(self.keys.len() as u64),
        };
        let ask = match random.below(8) {
            0..3 => Ask::Get,
            3..7 => Ask::Put(Value { tag: scene.next_tag(), len: VALUE_LEN }),
            _ => Ask::Delete,
        };
        (number, ask)
    }

    async fn perform(
        &self,
        scene: &Scene,
        client: &mut Client,
        _who: u32,
        key: u64,
        ask: &Ask,
    ) -> Result<Outcome, Failure> {
        let Client { opened, tree } = client;
        let mut performed = self.carry_out(scene, tree, key, ask).await;
        if opened.known.has_leases() && performed.is_ok() {
            // If the session ends before the WRITE has completed, the latch passes on, with or without the change.
            performed = tree.settle().await.map_err(Wrong::Error).and(performed);
        }
        let is_of_fabric =
            |error: &BtreeError| matches!(error, BtreeError::Latch { error: LatchError::Fabric(_), .. });
        opened.end(performed, is_of_fabric, Outcome::Failed)
    }

    /// In a store with leases, at times recovers the dead clients that are in nobody's way.
    async fn trespass(&self, scene: &Scene, client: &mut Client) -> Result<(), Failure> {
        if self.spec.lease.is_some() && scene.world.random().one_in(HEAL_ONE_IN) {
            client.tree.heal().await?;
        }
        Ok(())
    }

    async fn heal(&self, _scene: &Scene, client: &mut Client) -> Result<(), Failure> {
        Ok(client.tree.heal().await?)
    }

    /// Reads each key. If a client may have left a latch behind, there is nothing to read.
    fn read_all(&self, scene: &Scene) -> Vec<(u64, Ask)> {
        if self.stores.are_orphaned(scene) {
            return Vec::new();
        }
        self.keys.values().map(|&number| (number, Ask::Get)).collect()
    }

    async fn audit(&self, scene: &Scene, node: &Node, store: &str) -> Result<(), String> {
        self.stores.audit(scene, node, store).await
    }
}

impl Trial {
    async fn carry_out(
        &self,
        scene: &Scene,
        tree: &mut Btree<Tracked>,
        number: u64,
        ask: &Ask,
    ) -> Result<Outcome, Wrong<BtreeError>> {
        let key = key_of(number);
        let random = scene.world.random();
        let found_or_absent =
            |value: Option<u64>| value.map_or(Outcome::Absent, |value| Outcome::Found(of_word(value), None));
        match *ask {
            Ask::Get if random.one_in(3) => match self.look_by_scan(scene, tree, key).await? {
                Some(outcome) => Ok(outcome),
                None => Ok(found_or_absent(tree.get(key).await?)),
            },
            Ask::Get => Ok(found_or_absent(tree.get(key).await?)),
            Ask::Put(value) => {
                tree.put(key, word(value)).await?;
                Ok(Outcome::Done(None))
            }
            Ask::Delete => match tree.delete(key).await? {
                Some(_) => Ok(Outcome::Done(None)),
                None => Ok(Outcome::Absent),
            },
            _ => unreachable!("a tree has no operation {ask}"),
        }
    }

    /// Looks a key up by a scan from an earlier key. Returns `None` if the scan has ended before the key, at its limit.
    async fn look_by_scan(
        &self,
        scene: &Scene,
        tree: &mut Btree<Tracked>,
        key: u64,
    ) -> Result<Option<Outcome>, Wrong<BtreeError>> {
        let random = scene.world.random();
        let from = [0, key, random.bits()][random.below(3) as usize].min(key);
        let limit = if random.one_in(4) { random.between(1, 6) as usize } else { usize::MAX };
        let pairs = tree.scan(from, limit).await?;
        let violated =
            |what: &str| Err(Wrong::Violation(format!("a scan from {from:#x} returned {what}: {pairs:x?}")));
        if pairs.len() > limit {
            return violated("more pairs than its limit");
        }
        if !pairs.is_sorted_by(|one, next| one.0 < next.0) {
            return violated("keys that do not ascend");
        }
        for &(found, value) in &pairs {
            let value = of_word(value);
            if found < from || !self.keys.contains_key(&found) {
                return violated("a key that nobody has put");
            }
            if !(1..=scene.tags.get()).contains(&value.tag) || value.len != VALUE_LEN {
                return violated("a value that nobody has put");
            }
        }
        if let Some((_, value)) = pairs.iter().find(|(found, _)| *found == key) {
            return Ok(Some(Outcome::Found(of_word(*value), None)));
        }
        let has_passed = pairs.len() < limit || pairs.last().is_some_and(|(last, _)| *last > key);
        Ok(has_passed.then_some(Outcome::Absent))
    }
}

impl From<BtreeError> for Failure {
    fn from(error: BtreeError) -> Failure {
        let (message, ran) = (error.to_string(), error.ran());
        match error {
            BtreeError::Latch { error, .. } => Failure { ran, ..Failure::from(error) },
            BtreeError::TreeFull { .. } | BtreeError::StoreFull { .. } => {
                Failure { ran, kind: FailureKind::Declined, message }
            }
            _ => Failure { ran, kind: FailureKind::Wrong, message },
        }
    }
}
