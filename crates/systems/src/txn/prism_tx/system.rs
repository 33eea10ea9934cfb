//! PRISM-TX's entry in the registry.

use super::layout::{HEADER_SIZE, VALUE_MAX, WRITES_MAX};
use super::service::{PrismTxKind, Request};
use super::session::Session;
use super::site::Site;
use super::{Client, KIND, PrismTx, mutants};
use crate::hash_slots::Placement;
use crate::store::{Members, StoreError, buffer_bytes};
use crate::system::{Family, Footprint, Nodes, Options, Sizing, SizingError, System};
use crate::txn::session;
use farside_remote::clock::Clock;
use farside_remote::mutant::Mutant;
use farside_remote::service::Kind;
use farside_remote::{Capabilities, Fabric, Memory};
use std::rc::Rc;
use std::time::Duration;

impl System for PrismTxKind {
    const KIND: &'static str = KIND;
    const TITLE: &'static str = "PRISM-TX";
    const SUMMARY: &'static str = "a read-modify-write of one shard is three round trips";
    const FAMILY: Family = Family::Txn;
    const NODES: Nodes = Nodes::Shards;
    const NEEDS: Capabilities = Capabilities::CONDITIONAL_OPS.and(Capabilities::MASKED_CAS);

    const MUTANTS: &'static [Mutant] = mutants::ALL;
    // Tests of single steps expose them.
    const RARE_MUTANTS: &'static [Mutant] = &[
        mutants::READ_UNPREPARED,
        mutants::LEASE_UNCONFIRMED,
        mutants::RAISED_WITHOUT_WAIT,
        mutants::DECIDED_ERASED,
        mutants::UNKNOWN_FORGOTTEN,
        mutants::DECIDED_LATE,
        mutants::VERDICT_FROM_SLOTS,
        mutants::RAISED_UNPREPARED,
        mutants::LARGER_FIRST,
    ];

    type Client<F: Fabric + Clock> = PrismTx<F>;

    fn parameters(sizing: &Sizing) -> String {
        serde_json::to_string(&request_for(sizing)).expect("plain data")
    }

    fn footprint(sizing: &Sizing) -> Result<Footprint, SizingError> {
        if sizing.value_len > VALUE_MAX as usize {
            return Err(SizingError::Value(VALUE_MAX as usize));
        }
        SizingError::check_writes(sizing, WRITES_MAX)?;
        let spec = request_for(sizing).spec(0, 0).map_err(|_| SizingError::Items)?;
        let item_bytes = buffer_bytes(HEADER_SIZE + sizing.key_len + sizing.value_len);
        let table_bytes = spec.table_len().ok_or(SizingError::Items)?;
        Ok(Footprint { slots: spec.slots, table_bytes, item_bytes })
    }

    fn kind<M: Memory>() -> Box<dyn Kind<M>> {
        Box::new(PrismTxKind)
    }

    async fn open<F: Fabric + Clock>(
        fabric: F,
        members: &Members,
        options: &Options,
    ) -> Result<PrismTx<F>, StoreError> {
        members.check::<Self>(&fabric)?;
        let session = Session::open(Site::new(fabric, members)?, members, options).await?;
        Ok(PrismTx::of(&Rc::new(Client::new(session))))
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
fn request_for(sizing: &Sizing) -> Request {
    let micros = |duration: Duration| u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
    let transacting = sizing.transacting;
    Request {
        items: sizing.items,
        placement: if sizing.collision_free { Placement::Permuted } else { Placement::Hashed },
        ids: transacting.ids,
        lanes: transacting.lanes,
        lease_us: sizing.lease.map(micros),
        value_max: (sizing.value_len > 0).then_some(sizing.value_len as u32),
        writes_max: transacting.writes_max,
        prepare: transacting.prepare.unwrap_or_default(),
        clock_error_us: transacting.clock_error.map(micros),
    }
}
