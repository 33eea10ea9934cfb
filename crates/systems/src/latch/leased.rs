//! Leases as an option of a store with exclusive latches. No paper describes it: it is this project's.
//!
//! ```text
//! table | entries of leases | areas of redo records | then as without leases          each part begins at a cache line
//! ```
//!
//! A held latch has the word of its holder's operation ([`LockWord`]) in place of 1. A client that finds a latch held
//! for a while watches the holder's lease. If the lease expires, the client fences the holder at the node, and only
//! then recovers all of its latches (`crate::holder`).
//!
//! A holder may die in the middle of its WRITE. So each list of requests that writes an object first writes the new
//! image to a redo record of the holder ([`crate::redo`]). Whoever recovers the latch writes the image again.
//!
//! Without leases, a scheme costs what its paper says. With leases, each WRITE moves twice the bytes, and a client has
//! at most [`LeaseSpec::lanes`] lanes, each with a record.
//!
//! Invariant: an image is written only after its record, in the same list of requests.
//! Invariant: a client that may hold a latch and does not know gives up its lease, so that others recover the latch.

use super::layout::{Layout, Object};
use super::{Client, KIND, LatchError};
use crate::holder::{Holder, HolderError, Ids, Locks, Way};
use crate::identity::{self, Identity};
use crate::lease::{ENTRY_SIZE, LockWord, Table};
use crate::redo::{Areas, Object as Guarded};
use crate::store::StoreError;
use farside_remote::clock::Clock;
use farside_remote::control::Store;
use farside_remote::{Addr, Fabric, NodeId};
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::num::NonZeroU64;
use std::rc::Rc;
use std::time::Duration;

/// Number of client ids of a store whose sizing gives none.
const IDS: u16 = 64;
/// Number of lanes of a client of such a store: two for each of 64 tasks, and for the client's first handle. A handle
/// of a tree takes four.
const LANES: u16 = 130;

/// Leases of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeaseSpec {
    /// Length of a lease in microseconds.
    pub us: u64,
    /// Number of client ids.
    pub ids: u16,
    /// Number of lanes of a client; each handle of the client has two.
    pub lanes: u16,
}

impl LeaseSpec {
    /// Leases of this length, for as many clients and tasks as most programs have.
    pub(super) fn of(length: Duration) -> LeaseSpec {
        let us = u64::try_from(length.as_micros()).unwrap_or(u64::MAX);
        LeaseSpec { us, ids: IDS, lanes: LANES }
    }

    /// # Errors
    /// The parameter that is not possible.
    pub(super) fn check(&self) -> Result<(), String> {
        const IDS_MAX: u16 = 1024;
        const LANES_MAX: u16 = 1024;
        const US_MAX: u64 = 3_600_000_000;
        let LeaseSpec { us, ids, lanes } = *self;
        if !(1_000..=US_MAX).contains(&us) {
            return Err(format!("leases of {us} us, and 1000 to {US_MAX} are possible"));
        }
        if !(1..=IDS_MAX).contains(&ids) {
            return Err(format!("{ids} client ids, and 1 to {IDS_MAX} are possible"));
        }
        if !(2..=LANES_MAX).contains(&lanes) {
            return Err(format!("{lanes} lanes, and 2 to {LANES_MAX} are possible"));
        }
        Ok(())
    }

    /// Offset of the redo records in the table.
    fn areas_offset(self) -> u64 {
        (u64::from(self.ids) * ENTRY_SIZE).next_multiple_of(64)
    }

    /// Size of all of the table that leases need. `image_len` is the size of an object's image.
    pub(super) fn size(self, image_len: usize) -> u64 {
        let areas = self.areas(NodeId(0), farside_remote::Key::new(0, 0), Addr::new(0), image_len);
        self.areas_offset() + u64::from(self.ids) * areas.area_size()
    }

    /// The redo records of a store whose table begins at `table`.
    fn areas(self, node: NodeId, key: farside_remote::Key, table: Addr, image_len: usize) -> Areas {
        // One record more than lanes, for the recovery of inherited latches.
        Areas {
            node,
            key,
            at: table.plus(self.areas_offset()),
            lanes: self.lanes + 1,
            len_max: image_len as u32,
        }
    }

    fn ids(self) -> Ids {
        Ids { count: self.ids, lease: Duration::from_micros(self.us) }
    }
}

impl Locks for Layout {
    fn count(&self) -> u64 {
        self.spec.objects
    }

    fn object(&self, number: u64) -> Guarded {
        self.guarded(&Layout::object(self, number).expect("the store has this object"))
    }

    fn set_lock(&self, image: &mut [u8], word: LockWord) {
        self.set_latch(image, word.bits().get());
    }
}

/// The lease of a client, and its lanes.
pub(super) struct Leased<F> {
    pub(super) holder: Holder<Rc<F>, Layout>,
    areas: Areas,
    table: Table,
    /// Numbers of the lanes that no handle has.
    free_lanes: Rc<RefCell<Vec<u16>>>,
}

/// The number of a lane of a client. Dropping this value frees the number.
pub(super) struct LaneNumber {
    pub(super) number: u16,
    free: Rc<RefCell<Vec<u16>>>,
}

impl Drop for LaneNumber {
    fn drop(&mut self) {
        self.free.borrow_mut().push(self.number);
    }
}

impl<F> Leased<F> {
    /// Returns the number of a lane that no handle has; `None` if there is none.
    pub(super) fn lane(&self) -> Option<LaneNumber> {
        let number = self.free_lanes.borrow_mut().pop()?;
        Some(LaneNumber { number, free: Rc::clone(&self.free_lanes) })
    }

    /// # Errors
    /// The client has lost its lease, or has given it up.
    pub(super) fn check(&self) -> Result<(), LatchError> {
        if self.holder.is_given_up() { Err(LatchError::Lost) } else { Ok(()) }
    }

    /// The redo records.
    pub(super) fn areas(&self) -> &Areas {
        &self.areas
    }
}

impl<F: Fabric + Clock> Leased<F> {
    /// Leases an id, binds the session, and recovers the latches that it inherits.
    ///
    /// # Errors
    /// [`StoreError`]; no object was changed.
    pub(super) async fn open(
        fabric: &Rc<F>,
        node: NodeId,
        store: &Store,
        (layout, spec): (Layout, LeaseSpec),
        nonce: NonZeroU64,
    ) -> Result<Leased<F>, StoreError> {
        let (key, at) = (layout.table.key, Addr::new(layout.table.at));
        let (areas, table) =
            (spec.areas(node, key, at, layout.image_len() as usize), Table { node, key, at });
        let way = Way { fabric, areas: &areas, table: &table };
        let opened = Holder::open(way, store, spec.ids(), layout, nonce).await;
        let (holder, inherited) = opened.map_err(of_open)?;
        let identity = Identity { client: holder.id().number().into(), nonce: nonce.get() };
        identity::bind(fabric, node, store, identity).await.map_err(StoreError::Fabric)?;
        if let Some(inherited) = inherited {
            let recovery = holder.inherit(way, &inherited);
            holder.renewing(recovery, || ()).await.map_err(of_open)?;
        }
        let free_lanes = Rc::new(RefCell::new((0..spec.lanes).rev().collect()));
        Ok(Leased { holder, areas, table, free_lanes })
    }

    fn way<'a>(&'a self, fabric: &'a Rc<F>) -> Way<'a, Rc<F>> {
        Way { fabric, areas: &self.areas, table: &self.table }
    }
}

impl<F: Fabric + Clock> Client<F> {
    /// Returns the word of the next operation of a lane of a client with a lease.
    ///
    /// # Errors
    /// [`LatchError`]; nothing was changed.
    pub(super) async fn next_word(&self, leased: &Leased<F>, lane: u16) -> Result<LockWord, LatchError> {
        leased.check()?;
        Ok(leased.holder.next_word(leased.way(&self.fabric), lane).await?)
    }

    /// Waits a while for the holder of an object's latch, whose word is `found`. If the holder's lease has expired,
    /// recovers its latches. The lane has no latch. In a store without leases, does nothing.
    ///
    /// # Errors
    /// [`LatchError`]; nothing of the caller's was changed. A recovered latch may be held by this client.
    pub(super) async fn wait_for_holder(
        &self,
        lane: u16,
        object: &Object,
        found: u64,
    ) -> Result<(), LatchError> {
        let Some(leased) = &self.leased else { return Ok(()) };
        self.retries.set(self.retries.get() + 1);
        let (way, guarded) = (leased.way(&self.fabric), self.layout.guarded(object));
        Ok(leased.holder.wait_for(way, lane, &guarded, LockWord::of_bits(found)).await?)
    }

    /// Recovers all dead clients of a store with leases. Takes about the length of a lease. In a store without leases,
    /// does nothing.
    ///
    /// # Errors
    /// [`LatchError`]; some dead clients may have been recovered, and a latch may be held by this client.
    pub(super) async fn heal(&self, lane: u16) -> Result<(), LatchError> {
        let Some(leased) = &self.leased else { return Ok(()) };
        leased.check()?;
        Ok(leased.holder.heal(leased.way(&self.fabric), lane).await?)
    }
}

impl From<HolderError> for LatchError {
    fn from(error: HolderError) -> LatchError {
        match error {
            HolderError::Lease(error) => LatchError::Lease(error),
            HolderError::Redo(error) => LatchError::Redo(error),
            HolderError::Refused(status) => LatchError::Refused(status),
            HolderError::Damaged(what) => LatchError::Damaged(what),
            HolderError::Fabric(error) => LatchError::Fabric(error),
        }
    }
}

/// Returns the error of opening a store.
fn of_open(error: HolderError) -> StoreError {
    match LatchError::from(error) {
        LatchError::Fabric(error) => StoreError::Fabric(error),
        error => StoreError::Gone(format!("the {KIND} store was not opened: {error}")),
    }
}
