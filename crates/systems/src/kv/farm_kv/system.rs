//! FaRM-KV's entry in the registry.

use super::layout::{Table, TableSpec};
use super::service::FarmKvKind;
use super::{FarmKv, KIND, mutants};
use crate::kv::inplace;
use crate::kv::places::{self, NewStore};
use crate::store::{Members, StoreError};
use crate::system::{Family, Footprint, Nodes, Options, Sizing, SizingError, System, Work};
use farside_remote::clock::Clock;
use farside_remote::mutant::Mutant;
use farside_remote::service::Kind;
use farside_remote::{Capabilities, Fabric, Memory};

impl System for FarmKvKind {
    const KIND: &'static str = KIND;
    const TITLE: &'static str = "FaRM-KV";
    const SUMMARY: &'static str = "GET is one READ of 8 slots, PUT a call";
    const FAMILY: Family = Family::Kv;
    const NODES: Nodes = Nodes::Shards;
    const NEEDS: Capabilities = Capabilities::CALLS;
    const MUTANTS: &'static [Mutant] = mutants::ALL;
    const RARE_MUTANTS: &'static [Mutant] = &[
        mutants::JOINT_IGNORED,
        mutants::MOVED_SILENTLY,
        mutants::WRAP_ACCEPTED,
        mutants::INCARNATION_IGNORED,
    ];
    const WORK: Work = Work {
        // Accesses to the key's neighbourhood. The intents are in a cache.
        call_accesses: 2,
        // The service checksums the intent, which has the request's key and value.
        call_checksummed: |request, _| inplace::intent_checksummed(request.len()),
        ..Work::CHAINS
    };

    type Client<F: Fabric + Clock> = FarmKv<F>;

    fn parameters(sizing: &Sizing) -> String {
        NewStore::of(sizing).encoded()
    }

    fn footprint(sizing: &Sizing) -> Result<Footprint, SizingError> {
        places::footprint::<TableSpec>(sizing)
    }

    fn kind<M: Memory>() -> Box<dyn Kind<M>> {
        Box::new(FarmKvKind)
    }

    async fn open<F: Fabric + Clock>(
        fabric: F,
        members: &Members,
        _options: &Options,
    ) -> Result<FarmKv<F>, StoreError> {
        let (node, store) = members.one_of::<Self>(&fabric)?;
        let table = Table::new(&store.parameters, store.extent()).map_err(StoreError::Gone)?;
        Ok(FarmKv::of(fabric, node, store.clone(), table.spec.pair as usize, table))
    }
}
