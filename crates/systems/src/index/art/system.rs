//! The entry of the tree in the registry.

use super::counters::Counters;
use super::{Art, Client, KIND, MEMBERS_MAX, PATIENCE, mutants};
use crate::index::Index;
use crate::index::radix::Tree;
use crate::index::radix::drafts::Lane;
use crate::index::radix::layout::Growth;
use crate::index::radix::session::Session;
use crate::index::radix::store::{self, CACHE};
use crate::index::session::{beside, not_healed};
use crate::index::turns::Locals;
use crate::owned::Jobs;
use crate::store::{Members, StoreError};
use crate::system::{Family, Footprint, Nodes, Options, Sizing, SizingError, System};
use farside_remote::clock::Clock;
use farside_remote::mutant::Mutant;
use farside_remote::service::{Extent, Kind, Plan, Service};
use farside_remote::{Capabilities, Fabric, Memory};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// Node-side half of the tree.
pub struct ArtKind;

impl System for ArtKind {
    const KIND: &'static str = KIND;
    const TITLE: &'static str = "ART";
    const SUMMARY: &'static str = "get is one round trip with a warm cache, put is three";
    const FAMILY: Family = Family::Index;
    const NODES: Nodes = Nodes::Shards;
    const MEMBERS_MAX: usize = MEMBERS_MAX;
    const NEEDS: Capabilities = Capabilities::MASKED_CAS;
    const MUTANTS: &'static [Mutant] = mutants::ALL;
    /// It takes a request that is carried out long after its client has lost it.
    const RARE_MUTANTS: &'static [Mutant] = &[mutants::FREED_TOO_EARLY];

    type Client<F: Fabric + Clock> = Art<F>;

    fn parameters(sizing: &Sizing) -> String {
        serde_json::to_string(&store::spec_for(sizing, Growth::Copied)).expect("plain data")
    }

    fn footprint(sizing: &Sizing) -> Result<Footprint, SizingError> {
        store::footprint(sizing, Growth::Copied)
    }

    fn kind<M: Memory>() -> Box<dyn Kind<M>> {
        Box::new(ArtKind)
    }

    async fn open<F: Fabric + Clock>(
        fabric: F,
        members: &Members,
        options: &Options,
    ) -> Result<Art<F>, StoreError> {
        let layout = store::layout_of::<Self>(&fabric, members)?;
        let lanes = layout.spec.lanes;
        let session = Session::open(fabric, members, layout, options).await?;
        Ok(Art::of(&Rc::new(Client {
            tree: Tree::new(session, options.node_cache.unwrap_or(CACHE)),
            counters: Counters::default(),
            jobs: Jobs::new(lanes.into()),
            lanes: (0..lanes).map(|_| RefCell::new(Lane::default())).collect(),
            locals: Locals::default(),
            handles: Cell::new(0),
            swept: Cell::new(0),
            patience: options.patience.unwrap_or(PATIENCE),
        })))
    }

    async fn heal<F: Fabric + Clock>(
        fabric: F,
        members: &Members,
        options: &Options,
    ) -> Result<Vec<String>, StoreError> {
        let mut client = Self::open(fabric, members, options).await?;
        let keeper = client.keeper();
        let healing = async move {
            let healed = client.heal().await;
            (healed, client.recovered(), client.swept())
        };
        let (healed, recovered, swept) = beside(keeper, healing).await;
        healed.map_err(|error| not_healed(KIND, error))?;
        Ok(store::repairs(recovered, swept))
    }
}

impl<M: Memory> Kind<M> for ArtKind {
    fn name(&self) -> &'static str {
        KIND
    }

    fn plan(&self, parameters: &str, quota: u64, _entropy: u64) -> Result<Plan, String> {
        store::plan(KIND, Growth::Copied, parameters, quota)
    }

    fn is_table_only(&self) -> bool {
        true
    }

    fn serve(&self, parameters: &str, table: Extent) -> Result<Box<dyn Service<M>>, String> {
        store::serve(parameters, table)
    }
}
