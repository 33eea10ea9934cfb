//! The registered systems that are indexes.

use super::{Opened, Setting};
use crate::flight::Tracked;
use crate::{Choice, Drawn};
use farside_sim::fault::Fault;
use farside_sim::random::Random;
use farside_systems::index::{Combining, IndexError, Indexing, Keys};
use farside_systems::registry::AnyIndex;
use farside_systems::store::{Members, StoreError};
use farside_systems::system::{Options, Sizing};
use farside_systems::with_index;
use std::time::Duration;

/// Time for which an operation tries to take a lock. A dead client's lock is free after its lease and its recovery.
const PATIENCE: Duration = Duration::from_secs(1);

impl Opened for AnyIndex<Tracked> {
    const MEMBERS_MAX: u64 = 3;
    const HAS_STRINGS: bool = true;
    const ADDS: bool = true;
    const GOES_ON: bool = false;
    const IS_KEPT: bool = true;
    const MEMBER_MIB: [u64; 2] = [16, 1];

    fn drawn(drawn: &Drawn, random: &Random, keys: Keys) -> Setting {
        let clients = u64::from(drawn.clients);
        let us = random.between(5_000, 20_000);
        // If there are few ids, a client that restarts takes over the id of a dead one. The last client needs one, too.
        let ids = random.between(clients + 1, 2 * clients + 1) as u16;
        // One for each task, and for operations that were dropped and are not done yet.
        let lanes = random.between(2, 2 * u64::from(drawn.tasks) + 2) as u16;
        // The smallest chunk has one unit. Large chunks of long leaves exhaust a store that has little memory.
        let chunk = [2_560, 8 << 10, 64 << 10][random.below(3) as usize];
        let value_len = [8, 200, 2_000][random.below(3) as usize];
        let is_tight = drawn.faults.contains(&Fault::Exhaustion);
        let (chunk, value_len) = if is_tight { (64 << 10, 2_000) } else { (chunk, value_len) };
        let cache = [0, 300, 2_000, 1 << 20][random.below(4) as usize];
        let combinings =
            [(Combining::Batches, "all"), (Combining::Reads, "reads"), (Combining::None, "none")];
        let (combining, combined) = combinings[random.below(3) as usize];
        let indexing = Indexing {
            keys: Some(keys),
            chunk: Some(chunk),
            ids: Some(ids),
            lanes: Some(lanes),
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
            relaxed: None,
            choices: vec![
                Choice::new("lease_us", us, format!("lease {us} us")),
                Choice::new("ids", ids, format!("ids {ids}")),
                Choice::new("lanes", lanes, format!("lanes {lanes}")),
                Choice::new("chunk", chunk, format!("chunks of {chunk} bytes")),
                Choice::new("value_bytes", value_len as u64, format!("room for values of {value_len} bytes")),
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
}
