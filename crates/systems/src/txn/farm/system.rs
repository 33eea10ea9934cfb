//! FaRM's entry in the registry.

use super::layout::{VALUE_MAX, WRITES_MAX};
use super::service::{FarmKind, NewStore};
use super::session::Session;
use super::site::Site;
use super::{Client, Farm, KIND, mutants};
use crate::hash_slots::Placement;
use crate::store::{Members, StoreError};
use crate::system::{Family, Footprint, Nodes, Options, Sizing, SizingError, System, Work};
use crate::txn::session;
use farside_remote::clock::Clock;
use farside_remote::mutant::Mutant;
use farside_remote::service::Kind;
use farside_remote::{Capabilities, Fabric, Memory};
use std::rc::Rc;
use std::time::Duration;

impl System for FarmKind {
    const KIND: &'static str = KIND;
    const TITLE: &'static str = "FaRM";
    const SUMMARY: &'static str = "a read-modify-write of one shard is two READs and two calls";
    const FAMILY: Family = Family::Txn;
    const NODES: Nodes = Nodes::Shards;
    const NEEDS: Capabilities = Capabilities::CALLS;

    const MUTANTS: &'static [Mutant] = mutants::ALL;
    const RARE_MUTANTS: &'static [Mutant] = &[
        mutants::WRAP_ACCEPTED,
        mutants::LINES_UNMARKED,
        mutants::LATE_LOCK_GRANTED,
        mutants::RECORD_UNCOPIED,
        mutants::LEASE_UNCONFIRMED,
        mutants::LOOKED_ONCE,
        mutants::LOOKED_ON,
    ];

    const WORK: Work = Work {
        // The object. The lane's word and record are in a cache, since its last transaction has used them.
        call_accesses: 1,
        ..Work::CHAINS
    };

    type Client<F: Fabric + Clock> = Farm<F>;

    fn parameters(sizing: &Sizing) -> String {
        serde_json::to_string(&request_for(sizing)).expect("plain data")
    }

    fn footprint(sizing: &Sizing) -> Result<Footprint, SizingError> {
        if sizing.value_len > VALUE_MAX as usize {
            return Err(SizingError::Value(VALUE_MAX as usize));
        }
        SizingError::check_writes(sizing, WRITES_MAX)?;
        let spec = request_for(sizing).spec(0, 0).map_err(|_| SizingError::Items)?;
        let table_bytes = spec.table_len().ok_or(SizingError::Items)?;
        Ok(Footprint { slots: spec.slots, table_bytes, item_bytes: 0 })
    }

    fn kind<M: Memory>() -> Box<dyn Kind<M>> {
        Box::new(FarmKind)
    }

    async fn open<F: Fabric + Clock>(
        fabric: F,
        members: &Members,
        options: &Options,
    ) -> Result<Farm<F>, StoreError> {
        members.check::<Self>(&fabric)?;
        let session = Session::open(Site::new(fabric, members)?, members, options).await?;
        Ok(Farm::of(&Rc::new(Client::new(session))))
    }

    async fn heal<F: Fabric + Clock>(
        fabric: F,
        members: &Members,
        _options: &Options,
    ) -> Result<Vec<String>, StoreError> {
        members.check::<Self>(&fabric)?;
        session::heal(&Site::new(fabric, members)?).await
    }
}

/// Parameters of a store of this size.
fn request_for(sizing: &Sizing) -> NewStore {
    let micros = |duration: Duration| u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
    let transacting = sizing.transacting;
    NewStore {
        items: sizing.items,
        placement: if sizing.collision_free { Placement::Permuted } else { Placement::Hashed },
        ids: transacting.ids,
        lanes: transacting.lanes,
        lease_us: sizing.lease.map(micros),
        key_max: (sizing.key_len > 0).then_some(sizing.key_len as u32),
        value_max: (sizing.value_len > 0).then_some(sizing.value_len as u32),
        writes_max: transacting.writes_max,
        backups: transacting.backups,
        line: transacting.line,
    }
}
