//! The entry of the store with a cached index in the registry.

use super::cache::Cache;
use super::layout::{Table, TableSpec};
use super::service::CachedIndexKind;
use super::{CACHE_DEFAULT, CachedIndex, Index, KIND, mutants};
use crate::kv::inplace;
use crate::kv::places::{self, NewStore};
use crate::store::{Members, StoreError};
use crate::system::{Family, Footprint, Nodes, Options, Sizing, SizingError, System, Work};
use farside_remote::clock::Clock;
use farside_remote::mutant::Mutant;
use farside_remote::service::Kind;
use farside_remote::{Capabilities, Fabric, Memory};

impl System for CachedIndexKind {
    const KIND: &'static str = KIND;
    const TITLE: &'static str = "cached index";
    const SUMMARY: &'static str = "GET is one READ once the index is cached, PUT a call";
    const FAMILY: Family = Family::Kv;
    const NODES: Nodes = Nodes::Shards;
    const NEEDS: Capabilities = Capabilities::CALLS;
    const MUTANTS: &'static [Mutant] = mutants::ALL;
    const RARE_MUTANTS: &'static [Mutant] = &[mutants::WRAP_ACCEPTED];
    const WORK: Work = Work {
        // Accesses to the bucket and to the item. The intents are in a cache.
        call_accesses: 2,
        // The service checksums the intent, which has the request's key and value.
        call_checksummed: |request, _| inplace::intent_checksummed(request.len()),
        ..Work::CHAINS
    };

    type Client<F: Fabric + Clock> = CachedIndex<F>;

    fn parameters(sizing: &Sizing) -> String {
        NewStore::of(sizing).encoded()
    }

    fn footprint(sizing: &Sizing) -> Result<Footprint, SizingError> {
        places::footprint::<TableSpec>(sizing)
    }

    fn kind<M: Memory>() -> Box<dyn Kind<M>> {
        Box::new(CachedIndexKind)
    }

    async fn open<F: Fabric + Clock>(
        fabric: F,
        members: &Members,
        options: &Options,
    ) -> Result<CachedIndex<F>, StoreError> {
        let (node, store) = members.one_of::<Self>(&fabric)?;
        let table = Table::new(&store.parameters, store.extent()).map_err(StoreError::Gone)?;
        let cache = Cache::new(options.node_cache.unwrap_or(CACHE_DEFAULT), table.buckets());
        let pair_max = table.spec().pair as usize;
        Ok(CachedIndex::of(fabric, node, store.clone(), pair_max, Index { table, cache }))
    }
}
