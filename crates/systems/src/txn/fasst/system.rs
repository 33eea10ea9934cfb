//! FaSST's entry in the registry.

use super::layout::{Spec, VALUE_MAX, WRITES_MAX};
use super::service::{FasstKind, NewStore};
use super::session::Session;
use super::site::Site;
use super::{Client, Fasst, KIND, configuration, mutants};
use crate::hash_slots::Placement;
use crate::members;
use crate::store::{Members, StoreError};
use crate::system::{Family, Footprint, Nodes, Options, Sizing, SizingError, System, Work};
use crate::txn::session;
use farside_remote::clock::Clock;
use farside_remote::mutant::Mutant;
use farside_remote::service::Kind;
use farside_remote::{Capabilities, Fabric, Memory};
use std::rc::Rc;
use std::time::Duration;

impl System for FasstKind {
    const KIND: &'static str = KIND;
    const TITLE: &'static str = "FaSST";
    const SUMMARY: &'static str = "a read-modify-write of one shard is three calls";
    const FAMILY: Family = Family::Txn;
    const NODES: Nodes = Nodes::Shards;
    const REPLACES_MEMBERS: bool = true;
    const NEEDS: Capabilities = Capabilities::CALLS;

    const MUTANTS: &'static [Mutant] = mutants::ALL;
    const RARE_MUTANTS: &'static [Mutant] = mutants::RARE;
    const WORK: Work = Work {
        // The bucket of a request. The lane's word and record are in a cache, since its last transaction has used them.
        call_accesses: 1,
        ..Work::CHAINS
    };

    type Client<F: Fabric + Clock> = Fasst<F>;

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
        Ok(Footprint { slots: spec.all_buckets() * super::layout::SLOTS as u64, table_bytes, item_bytes: 0 })
    }

    /// A key has f copies beside the primary's, and a majority of the members decides on a replacement.
    fn losses(parameters: &str, members: usize) -> usize {
        let backups = serde_json::from_str(parameters).map_or(0, |spec: Spec| spec.backups);
        usize::from(backups).min(members.saturating_sub(1) / 2)
    }

    fn kind<M: Memory>() -> Box<dyn Kind<M>> {
        Box::new(FasstKind)
    }

    async fn open<F: Fabric + Clock>(
        fabric: F,
        members: &Members,
        options: &Options,
    ) -> Result<Fasst<F>, StoreError> {
        members.check::<Self>(&fabric)?;
        let session = Session::open(Site::new(fabric, members)?, members, options).await?;
        Ok(Fasst::of(&Rc::new(Client::new(session))))
    }

    async fn heal<F: Fabric + Clock>(
        fabric: F,
        members: &Members,
        options: &Options,
    ) -> Result<Vec<String>, StoreError> {
        members.check_kind::<Self>()?;
        let fabric = Rc::new(fabric);
        let mut done = configuration::heal(&fabric, members, options.entropy).await?;
        // The members may have been replaced since they were opened, here or by another recoverer.
        let reopened = match done.is_empty() && members.list().iter().all(|member| member.store.is_ok()) {
            true => None,
            false => Some(members::open(&fabric, members.nodes(), &members.store().name).await?),
        };
        let members = reopened.as_ref().unwrap_or(members);
        members.check::<Self>(&fabric)?;
        done.extend(session::heal(&Site::new(fabric, members)?).await?);
        Ok(done)
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
        seed: sizing.seed,
    }
}
