//! The registered systems that are indexes.

use super::{LOCKED_PHASES, Opened, PHASES, Setting};
use crate::flight::{Phases, Tracked};
use crate::{Carrier, Choice, Drawn};
use farside_remote::control::Store;
use farside_sim::fault::Fault;
use farside_sim::random::Random;
use farside_systems::index::sherman::system::ShermanKind;
use farside_systems::index::{Combining, IndexError, Indexing, Keys, Versions, art, sherman, smart};
use farside_systems::registry::AnyIndex;
use farside_systems::store::{Members, StoreError};
use farside_systems::system::{Options, Sizing, System as _};
use farside_systems::with_index;
use std::time::Duration;

/// Time for which an operation tries to take a lock. A dead client's lock is free after its lease and its recovery.
const PATIENCE: Duration = Duration::from_secs(1);

/// Size in bytes of the longest redo record of a leaf with room for 2,000 bytes.
const RECORD: u32 = 2_240;

impl Opened for AnyIndex<Tracked> {
    const MEMBERS_MAX: u64 = 3;
    const HAS_STRINGS: bool = true;
    const ADDS: bool = true;
    const GOES_ON: bool = true;
    const IS_KEPT: bool = true;
    const MEMBER_MIB: [u64; 2] = [16, 1];

    fn drawn(kind: &str, drawn: &Drawn, random: &Random, keys: Keys) -> Setting {
        if kind == sherman::KIND {
            return drawn_of_sherman(drawn, random, keys);
        }
        let clients = u64::from(drawn.clients);
        // With short leases, memory is used again soon.
        let us = if random.one_in(3) { random.between(1_000, 3_000) } else { random.between(5_000, 20_000) };
        // If there are few ids, a client that restarts takes over the id of a dead one. The last client needs one, too.
        let ids = random.between(clients + 1, 2 * clients + 1) as u16;
        // One for each task, and for operations that were dropped and are not done yet.
        let lanes = random.between(2, 2 * u64::from(drawn.tasks) + 2) as u16;
        // The smallest chunk has one unit of a long leaf, which is soon used again.
        let chunk = [2_560, 8 << 10, 64 << 10][random.below(3) as usize];
        let value_len = [8, 200, 2_000][random.below(3) as usize];
        let (chunk, value_len) = if random.one_in(3) { (2_560, 2_000) } else { (chunk, value_len) };
        let is_tight = drawn.faults.contains(&Fault::Exhaustion);
        // A store with little memory has room for a few such chunks, and each client needs several. Four must fit.
        let records = u32::from(ids) * (64 + (u32::from(lanes) + 1) * RECORD);
        let most = (((Self::MEMBER_MIB[1] as u32) << 20) - records - 1024) / 4 / 64 * 64;
        let (chunk, value_len) = if is_tight {
            ([64 << 10, 128 << 10, 192 << 10][random.below(3) as usize].min(most), 2_000)
        } else {
            (chunk, value_len)
        };
        let cache = [0, 200, 1_000, 1 << 20][random.below(4) as usize];
        let combinings =
            [(Combining::Batches, "all"), (Combining::Reads, "reads"), (Combining::None, "none")];
        let (combining, combined) = combinings[random.below(3) as usize];
        // Processes that execute chains die only by these faults, and keep their memory. A NIC also stops in the midst
        // of a WRITE when its session ends.
        let is_direct = drawn.carrier == Carrier::Direct;
        let cuts = |fault: &Fault| *fault == Fault::NodeRestart || is_direct && *fault == Fault::ClientDeath;
        let redo = drawn.carrier == Carrier::Verbs || drawn.faults.iter().any(cuts) || random.one_in(2);
        // Some values lie apart, and others beside their keys.
        let inline_max = if random.one_in(4) { 16.min(value_len) } else { value_len };
        let indexing = Indexing {
            keys: Some(keys),
            inline_max: Some(inline_max as u32),
            chunk: Some(chunk),
            ids: Some(ids),
            lanes: Some(lanes),
            redo: Some(redo),
            ..Indexing::NONE
        };
        let lease = Some(Duration::from_micros(us));
        Setting {
            sizing: Sizing { value_len, indexing, lease, ..Sizing::default() },
            options: Options {
                node_cache: Some(cache),
                combining,
                patience: Some(PATIENCE),
                ..Options::NONE
            },
            survives_deaths: true,
            has_leases: true,
            // The last word of a WRITE frees the lock of SMART.
            relaxed: (kind != art::KIND).then_some(false),
            choices: vec![
                Choice::new("lease_us", us, format!("lease {us} us")),
                Choice::new("ids", ids, format!("ids {ids}")),
                Choice::new("lanes", lanes, format!("lanes {lanes}")),
                Choice::new("redo", redo, if redo { "redo records" } else { "no redo records" }.into()),
                Choice::new("chunk", chunk, format!("chunks of {chunk} bytes")),
                Choice::new("value_bytes", value_len as u64, format!("room for values of {value_len} bytes")),
                Choice::new(
                    "inline_bytes",
                    inline_max as u64,
                    format!("{inline_max} of them beside their keys"),
                ),
                Choice::new("node_cache", cache as u64, format!("caches of {cache} bytes")),
                Choice::new("combining", combined, format!("combined {combined}")),
            ],
        }
    }

    async fn open(
        fabric: Tracked,
        _nodes: u32,
        members: &Members,
        options: &Options,
    ) -> Result<AnyIndex<Tracked>, StoreError> {
        AnyIndex::of(fabric, members, options).await
    }

    async fn another(&self) -> Result<AnyIndex<Tracked>, StoreError> {
        Ok(AnyIndex::another(self))
    }

    async fn heal(&mut self) -> Result<(), IndexError> {
        with_index!(self, index => index.heal().await)
    }

    fn held(store: &Store, load: impl Fn(u64) -> u64) -> Result<Vec<(u64, u64)>, String> {
        if store.kind == sherman::KIND { sherman::held(store, load) } else { smart::held(store, load) }
    }

    fn strays(stores: &[Store], load: impl Fn(usize, u64) -> u64) -> Result<Vec<String>, String> {
        let is_sherman = stores.iter().all(|store| store.kind == sherman::KIND);
        if is_sherman { sherman::strays(stores, load) } else { smart::strays(stores, load) }
    }

    fn phases(kind: &str) -> &'static Phases {
        if kind == sherman::KIND { &LOCKED_PHASES } else { &PHASES }
    }
}

/// Draws the options of Sherman: small nodes, which split often, and few locks, which nodes share.
fn drawn_of_sherman(drawn: &Drawn, random: &Random, keys: Keys) -> Setting {
    let clients = u64::from(drawn.clients);
    let us = if random.one_in(3) { random.between(1_000, 3_000) } else { random.between(5_000, 20_000) };
    // If there are few ids, a client that restarts takes over the id of a dead one. The last client needs one, too.
    let ids = random.between(clients + 1, 2 * clients + 1) as u16;
    // One for each task, and for operations that were dropped and are not done yet.
    let lanes = random.between(2, 2 * u64::from(drawn.tasks) + 2) as u16;
    // The smallest node has four entries.
    let node = [1, 1, 2 << 10, 4 << 10][random.below(4) as usize];
    let value_len = [8, 200, 1_000][random.below(3) as usize];
    let locks = [1, 4, 256][random.below(3) as usize];
    let cache = [0, 1_000, 4_000, 1 << 20][random.below(4) as usize];
    // Only a NIC reads lines as a whole. A READ over sockets takes long enough for short versions to wrap.
    let versions = match drawn.carrier {
        Carrier::Verbs if random.one_in(2) => Versions { line: 64, bits: 8 },
        Carrier::Direct if random.one_in(2) => Versions { line: 16, bits: 8 },
        _ => Versions { line: 16, bits: 16 },
    };
    let is_direct = drawn.carrier == Carrier::Direct;
    let cuts = |fault: &Fault| *fault == Fault::NodeRestart || is_direct && *fault == Fault::ClientDeath;
    let redo = drawn.carrier == Carrier::Verbs || drawn.faults.iter().any(cuts) || random.one_in(2);
    let sizing = |node: u32, value_len: usize, lanes: u16| Sizing {
        value_len,
        indexing: Indexing {
            keys: Some(keys),
            chunk: Some(node),
            ids: Some(ids),
            lanes: Some(lanes),
            redo: Some(redo),
            locks: Some(locks),
            versions: Some(versions),
            ..Indexing::NONE
        },
        lease: Some(Duration::from_micros(us)),
        ..Sizing::default()
    };
    // The redo records leave a store with little memory room for a few nodes.
    let fits = |lanes: &u16| {
        let footprint = ShermanKind::footprint(&sizing(1, 1_000, *lanes));
        footprint.is_ok_and(|of| of.table_bytes <= (AnyIndex::<Tracked>::MEMBER_MIB[1]) << 20)
    };
    let (node, value_len, lanes) = match drawn.faults.contains(&Fault::Exhaustion) {
        true => (1, 1_000, (2..=256).rev().find(fits).unwrap_or(2)),
        false => (node, value_len, lanes),
    };
    Setting {
        sizing: sizing(node, value_len, lanes),
        options: Options { node_cache: Some(cache), patience: Some(PATIENCE), ..Options::NONE },
        survives_deaths: true,
        has_leases: true,
        relaxed: None,
        choices: vec![
            Choice::new("lease_us", us, format!("lease {us} us")),
            Choice::new("ids", ids, format!("ids {ids}")),
            Choice::new("lanes", lanes, format!("lanes {lanes}")),
            Choice::new("redo", redo, if redo { "redo records" } else { "no redo records" }.into()),
            Choice::new("node", node, format!("nodes of {node} bytes or four entries")),
            Choice::new("locks", locks, format!("{locks} locks")),
            Choice::new(
                "version_bits",
                versions.bits,
                format!("versions of {} bits for {} bytes", versions.bits, versions.line),
            ),
            Choice::new("value_bytes", value_len as u64, format!("room for values of {value_len} bytes")),
            Choice::new("node_cache", cache as u64, format!("caches of {cache} bytes")),
        ],
    }
}
