//! The shell's session with a store. The session is opened for the first operation, and opened again for the first
//! operation after it has ended.
//!
//! Invariant: an operation is retried at most once, and only if it is known that it did not run.

use crate::cli::Failure;
use crate::cli::kv::not_opened;
use farside::parts::{AnyKv, Endpoint};
use farside::{KvError, Pool, Ran};
use farside_fabrics::executor::block_on;
use farside_fabrics::layer::trace::Trace;
use farside_remote::{FabricError, Status};
use farside_systems::system::Options;
use std::cell::Cell;
use std::rc::Rc;

/// The fabric to the node, in a layer that prints each request while tracing is on.
type TracedFabric = Rc<Trace<Rc<Endpoint>, Box<dyn Fn(&str)>>>;

/// The shell's client of a store.
pub(super) type Kv = AnyKv<TracedFabric>;

/// The node, the store in use, and the open session with it, if any.
pub(super) struct Session {
    pub(super) pool: Pool,
    store: String,
    opened: Option<Opened>,
    /// Name and identity of the store that was opened last. A new store of the same name has another identity.
    last_opened: Option<(String, [u64; 2])>,
    tracing: Rc<Cell<bool>>,
}

struct Opened {
    endpoint: Rc<Endpoint>,
    kv: Kv,
}

impl Session {
    /// Prepares a session with the store of this name. Does not open the session.
    pub(super) fn new(pool: Pool, store: String) -> Session {
        Session { pool, store, opened: None, last_opened: None, tracing: Rc::default() }
    }

    /// Returns the name of the store in use.
    pub(super) fn store(&self) -> &str {
        &self.store
    }

    /// Starts or stops the printing of each request to the node.
    pub(super) fn trace(&self, on: bool) {
        self.tracing.set(on);
    }

    /// Switches to another store. If it cannot be opened, the session stays with the former one.
    pub(super) fn change_to(&mut self, store: String) -> Result<(), Failure> {
        let mut other =
            Session { tracing: Rc::clone(&self.tracing), ..Session::new(self.pool.clone(), store) };
        other.open()?;
        *self = other;
        Ok(())
    }

    /// Runs an operation. If the session has ended and the operation did not run, retries the operation once over a new
    /// session.
    pub(super) fn carry_out<O>(
        &mut self,
        mut operation: impl AsyncFnMut(&mut Kv) -> Result<O, KvError>,
    ) -> Result<O, Failure> {
        let is_fresh = self.opened.is_none();
        let error = match self.try_once(&mut operation)? {
            Ok(output) => return Ok(output),
            Err(error) => error,
        };
        if !ends_session(&error) {
            return Err(error.into());
        }
        self.opened = None;
        if is_fresh || error.ran() != Ran::No {
            return Err(error.into());
        }
        let again = self.try_once(&mut operation)?;
        again.map_err(|error| {
            self.opened = self.opened.take().filter(|_| !ends_session(&error));
            error.into()
        })
    }

    fn try_once<O>(
        &mut self,
        operation: &mut impl AsyncFnMut(&mut Kv) -> Result<O, KvError>,
    ) -> Result<Result<O, KvError>, Failure> {
        let Opened { endpoint, kv } = self.open()?;
        Ok(block_on(&*endpoint, operation(kv)))
    }

    /// Returns the open session, or opens a session.
    fn open(&mut self) -> Result<&mut Opened, Failure> {
        if self.opened.is_none() {
            let endpoint = Rc::new(self.pool.endpoint_over_all()?);
            let tracing = Rc::clone(&self.tracing);
            let print: Box<dyn Fn(&str)> = Box::new(move |text| {
                if tracing.get() {
                    note!("{text}");
                }
            });
            let fabric = Rc::new(Trace::new(Rc::clone(&endpoint), print));
            let kv =
                block_on(&endpoint, AnyKv::open(fabric, endpoint.nodes(), &self.store, &Options::default()))
                    .map_err(|error| not_opened(&self.pool, &self.store, error))?;
            let store = kv.store();
            let found = (store.name.clone(), store.identity());
            if self.last_opened.as_ref().is_some_and(|last| *last != found) {
                note!(
                    "farside: the store '{}' was dropped and created again: its former content is gone",
                    self.store
                );
            }
            self.last_opened = Some(found);
            self.opened = Some(Opened { endpoint, kv });
        }
        Ok(self.opened.as_mut().expect("it was opened above"))
    }

    /// Opens the session with the store, unless it is open.
    pub(super) fn ensure(&mut self) -> Result<(), Failure> {
        self.open().map(drop)
    }
}

/// Whether an error means that the session has ended, or that its key to the store was revoked.
fn ends_session(error: &KvError) -> bool {
    use FabricError::{Broken, Lost, NodeDied};
    matches!(
        error,
        KvError::Fabric(NodeDied(_) | Broken { .. } | Lost { .. })
            | KvError::Store(_)
            | KvError::Refused(Status::Access)
    )
}
