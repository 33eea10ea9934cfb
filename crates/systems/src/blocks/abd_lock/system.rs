//! ABDLOCK's entry in the registry.

use super::layout::{Spec, WRITERS};
use super::service::AbdLockKind;
use super::{AbdLock, KIND, mutants};
use crate::blocks::BLOCK_MAX;
use crate::store::{Members, StoreError};
use crate::system::{Family, Footprint, Nodes, Options, Sizing, SizingError, System};
use farside_remote::clock::Clock;
use farside_remote::mutant::Mutant;
use farside_remote::service::Kind;
use farside_remote::{Capabilities, Fabric, Memory};

/// Length of a block of a store whose sizing gives none, in bytes.
const BLOCK: usize = 4096;

impl System for AbdLockKind {
    const KIND: &'static str = KIND;
    const TITLE: &'static str = "ABDLOCK";
    const SUMMARY: &'static str = "GET and PUT are three or four waves of classic verbs";
    const FAMILY: Family = Family::Blocks;
    const NODES: Nodes = Nodes::Replicas;
    const NEEDS: Capabilities = Capabilities::NONE;
    const MUTANTS: &'static [Mutant] = mutants::ALL;
    /// They need lost requests, or a lock that is granted late, while another client acts within the same moment.
    const RARE_MUTANTS: &'static [Mutant] =
        &[mutants::UNLOCKS_UNHELD, mutants::LATE_GRANT_WRITTEN, mutants::SETTLED_TOO_EARLY];

    type Client<F: Fabric + Clock> = AbdLock<F>;

    fn parameters(sizing: &Sizing) -> String {
        let mut parameters = serde_json::json!({
            "block": block_of(sizing), "blocks": sizing.items, "writers": writers_of(sizing)
        });
        if let Some(lease_us) = lease_us_of(sizing) {
            parameters["lease_us"] = lease_us.into();
        }
        parameters.to_string()
    }

    fn footprint(sizing: &Sizing) -> Result<Footprint, SizingError> {
        let block = u32::try_from(block_of(sizing)).map_err(|_| SizingError::Value(BLOCK_MAX))?;
        let one = Spec { block, blocks: 1, writers: writers_of(sizing), lease_us: lease_us_of(sizing) };
        one.check().map_err(|_| SizingError::Value(one.block_max()))?;
        let spec = Spec { blocks: sizing.items.unwrap_or(1), ..one };
        spec.check().map_err(|_| SizingError::Items)?;
        let table_bytes = spec.table_len().ok_or(SizingError::Items)?;
        Ok(Footprint { slots: spec.blocks, table_bytes, item_bytes: 0 })
    }

    fn kind<M: Memory>() -> Box<dyn Kind<M>> {
        Box::new(AbdLockKind)
    }

    async fn open<F: Fabric + Clock>(
        fabric: F,
        members: &Members,
        options: &Options,
    ) -> Result<AbdLock<F>, StoreError> {
        AbdLock::of(fabric, members, options)
    }
}

fn writers_of(sizing: &Sizing) -> u32 {
    sizing.writers.unwrap_or(WRITERS)
}

fn lease_us_of(sizing: &Sizing) -> Option<u64> {
    sizing.lease.map(|lease| u64::try_from(lease.as_micros()).unwrap_or(u64::MAX))
}

fn block_of(sizing: &Sizing) -> usize {
    if sizing.value_len == 0 { BLOCK } else { sizing.value_len }
}
