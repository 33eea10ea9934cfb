//! The entry of latched objects in the registry, and the work of the node's CPU: to plan the table.

use super::layout::{Layout, Spec};
use super::leased::{LeaseSpec, Leased};
use super::scheme::Reads;
use super::{Client, KIND, LEN_MAX, Latched, Latching, PATIENCE, Scheme, mutants};
use crate::store::{Members, StoreError};
use crate::system::{Backoff, Family, Footprint, Options, Sizing, SizingError, System};
use farside_remote::clock::Clock;
use farside_remote::draws::Draws;
use farside_remote::mutant::Mutant;
use farside_remote::service::{Extent, Kind, Plan, Service};
use farside_remote::{Capabilities, Fabric, Memory};
use std::cell::{Cell, RefCell};
use std::num::NonZeroU64;
use std::rc::Rc;

/// Scheme of a store whose sizing names none.
const SCHEME: &str = "v2";
/// Content of an object of a store whose sizing gives no length, in bytes.
const LEN: usize = 248;

/// Node-side half of latched objects.
pub struct LatchKind;

impl System for LatchKind {
    const KIND: &'static str = KIND;
    const TITLE: &'static str = "latched objects";
    const SUMMARY: &'static str = "one to four round trips of classic verbs, by the scheme";
    const FAMILY: Family = Family::Latched;
    const NEEDS: Capabilities = Capabilities::NONE;
    const MUTANTS: &'static [Mutant] = &mutants::WITH_LEASES;

    type Client<F: Fabric + Clock> = Latched<F>;

    fn parameters(sizing: &Sizing) -> String {
        serde_json::to_string(&spec_for(sizing)).expect("plain data")
    }

    fn footprint(sizing: &Sizing) -> Result<Footprint, SizingError> {
        if sizing.value_len > LEN_MAX as usize {
            return Err(SizingError::Value(LEN_MAX as usize));
        }
        let spec = spec_for(sizing);
        spec.check().map_err(|_| SizingError::Items)?;
        let table_bytes = spec.table_len().ok_or(SizingError::Items)?;
        Ok(Footprint { slots: spec.objects, table_bytes, item_bytes: 0 })
    }

    fn kind<M: Memory>() -> Box<dyn Kind<M>> {
        Box::new(LatchKind)
    }

    async fn open<F: Fabric + Clock>(
        fabric: F,
        members: &Members,
        options: &Options,
    ) -> Result<Latched<F>, StoreError> {
        let (node, store) = members.one_of::<Self>(&fabric)?;
        let layout = Layout::new(&store.parameters, store.extent()).map_err(StoreError::Gone)?;
        let (scheme, has) = (layout.spec.scheme, fabric.capabilities(node));
        if !has.contains(scheme.needs()) {
            return Err(StoreError::Gone(format!(
                "the scheme {scheme} of store '{}' needs a fabric with {}, and the one to node {} has only: {has}; \
                 nothing was changed: reach the node by another fabric, or create the store with the scheme {}",
                store.name,
                scheme.needs(),
                node.0,
                Scheme { reads: Reads::Checksum, ..scheme }
            )));
        }
        let fabric = Rc::new(fabric);
        let leased = match layout.spec.lease {
            None => None,
            Some(spec) => {
                if options.entropy == 0 {
                    return Err(StoreError::Gone(format!(
                        "store '{}' has leases, and a client needs random entropy in its options, so that no two \
                         clients have one nonce: nothing was changed",
                        store.name
                    )));
                }
                let nonce = NonZeroU64::new(Draws(options.entropy).next()).unwrap_or(NonZeroU64::MIN);
                Some(Leased::open(&fabric, node, store, (layout, spec), nonce).await?)
            }
        };
        Ok(Latched::of(&Rc::new(Client {
            leased,
            fabric,
            node,
            layout,
            backoff: options.backoff.unwrap_or(Backoff::NONE),
            patience: options.patience.unwrap_or(PATIENCE),
            draws: RefCell::new(Draws(options.entropy)),
            retries: Cell::new(0),
            handles: Cell::new(0),
            keepers: Cell::new(0),
            kept: RefCell::default(),
        })))
    }
}

impl LatchKind {
    /// Size in bytes of the table of a store with these parameters.
    ///
    /// # Panics
    /// If no store can have these parameters.
    pub fn table_len(spec: &Spec) -> u64 {
        spec.table_len().expect("the parameters are valid")
    }
}

/// Parameters of a store of this size.
fn spec_for(sizing: &Sizing) -> Spec {
    let Latching { scheme, placement } = sizing.latching;
    let len = if sizing.value_len == 0 { LEN } else { sizing.value_len.next_multiple_of(8) };
    Spec {
        objects: sizing.items.unwrap_or(1024),
        len: u32::try_from(len).unwrap_or(u32::MAX),
        scheme: scheme.unwrap_or_else(|| Scheme::named(SCHEME).expect("it has a name")),
        placement,
        relaxed: false,
        lease: sizing.lease.map(LeaseSpec::of),
    }
}

impl<M: Memory> Kind<M> for LatchKind {
    fn name(&self) -> &'static str {
        KIND
    }

    fn plan(&self, parameters: &str, _quota: u64, _entropy: u64) -> Result<Plan, String> {
        let wrong = |reason: String| {
            format!("a {KIND} store takes {{\"objects\": N, \"len\": BYTES, \"scheme\": NAME}}: {reason}")
        };
        let spec: Spec = serde_json::from_str(parameters).map_err(|error| wrong(error.to_string()))?;
        spec.check().map_err(wrong)?;
        let table_len = spec.table_len().expect("the parameters were checked");
        Ok(Plan { table_len, parameters: parameters.into(), wide: false })
    }

    fn serve(&self, parameters: &str, table: Extent) -> Result<Box<dyn Service<M>>, String> {
        Ok(Box::new(Layout::new(parameters, table)?))
    }
}

impl<M: Memory> Service<M> for Layout {
    fn live(&self, _memory: &M, _cursor: u64, _found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait> {
        Ok(None) // The objects lie in the table, and point to no buffers.
    }
}
