//! The entry of the tree in the registry.

use super::combine::Combine;
use super::counters::Counters;
use super::{Client, KIND, MEMBERS_MAX, PATIENCE, Smart, mutants};
use crate::index::Index;
use crate::index::radix::Tree;
use crate::index::radix::drafts::Lane;
use crate::index::radix::layout::Growth;
use crate::index::radix::mutants as shared;
use crate::index::radix::session::Session;
use crate::index::radix::store::{self, CACHE};
use crate::index::session::{beside, not_healed};
use crate::owned::Jobs;
use crate::store::{Members, StoreError};
use crate::system::{Family, Footprint, Nodes, Options, Sizing, SizingError, System};
use farside_remote::clock::Clock;
use farside_remote::mutant::Mutant;
use farside_remote::service::{Extent, Kind, Plan, Service};
use farside_remote::{Capabilities, Fabric, Memory};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// The mutants of SMART, and of what it shares with ART.
const ALL_MUTANTS: [Mutant; mutants::ALL.len() + shared::ALL.len()] = {
    let (mut all, mut index) = ([mutants::ALL[0]; mutants::ALL.len() + shared::ALL.len()], 0);
    while index < all.len() {
        let own = mutants::ALL.len();
        all[index] = if index < own { mutants::ALL[index] } else { shared::ALL[index - own] };
        index += 1;
    }
    all
};

/// Node-side half of the tree.
pub struct SmartKind;

impl System for SmartKind {
    const KIND: &'static str = KIND;
    const TITLE: &'static str = "SMART";
    const SUMMARY: &'static str = "get is one round trip with a warm cache, put is three";
    const FAMILY: Family = Family::Index;
    const NODES: Nodes = Nodes::Shards;
    const MEMBERS_MAX: usize = MEMBERS_MAX;
    const NEEDS: Capabilities = Capabilities::MASKED_CAS;
    const MUTANTS: &'static [Mutant] = &ALL_MUTANTS;
    /// The first two only cost requests, and a reader notices the third only if memory is damaged. The fourth acts only
    /// if some values lie apart, and the fifth in stores without updates in place. Few trials retire enough for the
    /// last one, and the tests of `farside-systems` have a seed.
    const RARE_MUTANTS: &'static [Mutant] = &[
        mutants::REV_PTR_ROLLED_BACK,
        mutants::MASKED_CAS_FULL_WORD,
        shared::CHECKSUM_WITHOUT_KEY,
        mutants::LEAF_BEFORE_VALUE,
        mutants::REPLACED_LEAF_BELIEVED,
        shared::REUSED_BEFORE_EPOCH,
    ];

    type Client<F: Fabric + Clock> = Smart<F>;

    fn parameters(sizing: &Sizing) -> String {
        serde_json::to_string(&store::spec_for(sizing, Growth::Switched)).expect("plain data")
    }

    fn footprint(sizing: &Sizing) -> Result<Footprint, SizingError> {
        store::footprint(sizing, Growth::Switched)
    }

    fn kind<M: Memory>() -> Box<dyn Kind<M>> {
        Box::new(SmartKind)
    }

    async fn open<F: Fabric + Clock>(
        fabric: F,
        members: &Members,
        options: &Options,
    ) -> Result<Smart<F>, StoreError> {
        let layout = store::layout_of::<Self>(&fabric, members)?;
        let (lanes, rung) = (layout.spec.lanes, layout.spec.rung);
        let session = Session::open(fabric, members, layout, options).await?;
        Ok(Smart::of(&Rc::new(Client {
            tree: Tree::new(session, options.node_cache.unwrap_or(CACHE)),
            counters: Counters::default(),
            combining: rung.combining(options.combining),
            gets: Combine::default(),
            puts: Combine::default(),
            jobs: Jobs::new(lanes.into()),
            lanes: (0..lanes).map(|_| RefCell::new(Lane::default())).collect(),
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

impl<M: Memory> Kind<M> for SmartKind {
    fn name(&self) -> &'static str {
        KIND
    }

    fn plan(&self, parameters: &str, quota: u64, _entropy: u64) -> Result<Plan, String> {
        store::plan(KIND, Growth::Switched, parameters, quota)
    }

    fn is_table_only(&self) -> bool {
        true
    }

    fn serve(&self, parameters: &str, table: Extent) -> Result<Box<dyn Service<M>>, String> {
        store::serve(parameters, table)
    }
}
