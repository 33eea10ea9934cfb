//! PRISM-RS's entry in the registry.

use super::layout::{Spec, WRITERS};
use super::service::{PrismRsKind, Request};
use super::{KIND, PrismRs, mutants, replace};
use crate::blocks::BLOCK_MAX;
use crate::store::{Members, StoreError, buffer_bytes};
use crate::system::{Family, Footprint, Nodes, Options, Sizing, SizingError, System};
use farside_remote::clock::Clock;
use farside_remote::mutant::Mutant;
use farside_remote::service::Kind;
use farside_remote::{Capabilities, Fabric, Memory};

/// Length of a block of a store whose sizing gives none, in bytes.
const BLOCK: usize = 4096;

impl System for PrismRsKind {
    const KIND: &'static str = KIND;
    const TITLE: &'static str = "PRISM-RS";
    const SUMMARY: &'static str = "GET is one or two waves of chains, PUT two";
    const FAMILY: Family = Family::Blocks;
    const NODES: Nodes = Nodes::Replicas;
    const REPLACES_MEMBERS: bool = true;
    // An install compares the tag alone.
    const NEEDS: Capabilities = Capabilities::CONDITIONAL_OPS.and(Capabilities::MASKED_CAS);
    const MUTANTS: &'static [Mutant] = mutants::ALL;
    // These need several rare events at once: tests of replacements expose them.
    const RARE_MUTANTS: &'static [Mutant] = &[
        mutants::WIPED_ACK_COUNTS,
        mutants::CONFIGURATIONS_MIXED,
        mutants::IDS_FORGOTTEN,
        mutants::BALLOT_REUSED,
        mutants::TWO_CONFIGURATIONS,
    ];

    type Client<F: Fabric + Clock> = PrismRs<F>;

    fn parameters(sizing: &Sizing) -> String {
        let request = Request {
            block: block_of(sizing) as u32,
            blocks: sizing.items,
            writers: writers_of(sizing),
            stripe: sizing.stripe,
        };
        serde_json::to_string(&request).expect("plain data")
    }

    fn footprint(sizing: &Sizing) -> Result<Footprint, SizingError> {
        let block = u32::try_from(block_of(sizing)).map_err(|_| SizingError::Value(BLOCK_MAX))?;
        let one = Spec { block, blocks: 1, writers: writers_of(sizing), stripe: sizing.stripe };
        one.check().map_err(|_| SizingError::Value(BLOCK_MAX))?;
        let spec = Spec { blocks: sizing.items.unwrap_or(1), ..one };
        spec.check().map_err(|_| SizingError::Items)?;
        Ok(Footprint {
            slots: spec.blocks,
            table_bytes: spec.table_len().ok_or(SizingError::Items)?,
            item_bytes: buffer_bytes(block as usize),
        })
    }

    fn kind<M: Memory>() -> Box<dyn Kind<M>> {
        Box::new(PrismRsKind)
    }

    async fn open<F: Fabric + Clock>(
        fabric: F,
        members: &Members,
        _options: &Options,
    ) -> Result<PrismRs<F>, StoreError> {
        PrismRs::of(fabric, members)
    }

    async fn heal<F: Fabric + Clock>(
        fabric: F,
        members: &Members,
        options: &Options,
    ) -> Result<Vec<String>, StoreError> {
        replace::heal(&fabric, members, options.entropy).await
    }
}

fn writers_of(sizing: &Sizing) -> u32 {
    sizing.writers.unwrap_or(WRITERS)
}

fn block_of(sizing: &Sizing) -> usize {
    if sizing.value_len == 0 { BLOCK } else { sizing.value_len }
}
