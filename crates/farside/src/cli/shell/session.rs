//! The shell's session with a store: opened when something is asked, and again when it is over.
//!
//! Invariant: an operation is tried again only if it is known that it was not carried out, and once.

use crate::cli::Failure;
use crate::cli::kv::not_opened;
use farside::parts::{AnyKv, Endpoint};
use farside::{KvError, Pool, Ran};
use farside_fabrics::executor::block_on;
use farside_fabrics::layer::trace::Trace;
use farside_remote::{FabricError, NodeId, Status};
use farside_systems::system::Options;
use std::cell::Cell;
use std::rc::Rc;

/// What tells of each request, if it is to be told.
type Watched = Rc<Trace<Rc<Endpoint>, Box<dyn Fn(&str)>>>;

/// A client of a store.
pub(super) type Kv = AnyKv<Watched>;

/// The node, the store that is in use, and the session with it while there is one.
pub(super) struct Session {
    pub(super) pool: Pool,
    store: String,
    opened: Option<Opened>,
    /// The store that was opened last, which another of the same name is not.
    known: Option<Identity>,
    tracing: Rc<Cell<bool>>,
}

struct Opened {
    endpoint: Rc<Endpoint>,
    kv: Kv,
}

#[derive(PartialEq)]
struct Identity {
    name: String,
    id: u64,
    incarnation: u64,
}

impl Session {
    /// A session to be, with the store called `store`.
    pub(super) fn new(pool: Pool, store: String) -> Session {
        Session { pool, store, opened: None, known: None, tracing: Rc::default() }
    }

    /// The store in use.
    pub(super) fn store(&self) -> &str {
        &self.store
    }

    /// Whether requests are told of from now on.
    pub(super) fn trace(&self, on: bool) {
        self.tracing.set(on);
    }

    /// Goes on with another store; with the one before if that cannot be opened.
    pub(super) fn change_to(&mut self, store: String) -> Result<(), Failure> {
        let mut other =
            Session { tracing: Rc::clone(&self.tracing), ..Session::new(self.pool.clone(), store) };
        other.open()?;
        *self = other;
        Ok(())
    }

    /// Carries out an operation; once more, over another session, if this one is over and the operation was not
    /// carried out.
    pub(super) fn carry_out<O>(
        &mut self,
        mut operation: impl AsyncFnMut(&mut Kv) -> Result<O, KvError>,
    ) -> Result<O, Failure> {
        let is_fresh = self.opened.is_none();
        let error = match self.try_once(&mut operation)? {
            Ok(output) => return Ok(output),
            Err(error) => error,
        };
        if !is_over(&error) {
            return Err(error.into());
        }
        self.opened = None;
        if is_fresh || error.ran() != Ran::No {
            return Err(error.into());
        }
        let again = self.try_once(&mut operation)?;
        again.map_err(|error| {
            self.opened = self.opened.take().filter(|_| !is_over(&error));
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

    /// The session that there is, or another.
    fn open(&mut self) -> Result<&mut Opened, Failure> {
        if self.opened.is_none() {
            let endpoint = Rc::new(self.pool.endpoint_here()?);
            let tracing = Rc::clone(&self.tracing);
            let tell: Box<dyn Fn(&str)> = Box::new(move |text| {
                if tracing.get() {
                    note!("{text}");
                }
            });
            let fabric = Rc::new(Trace::new(Rc::clone(&endpoint), tell));
            let kv = block_on(&endpoint, AnyKv::open(fabric, NodeId(0), &self.store, &Options::default()))
                .map_err(|error| not_opened(&self.pool, &self.store, error))?;
            let store = kv.store();
            let found = Identity { name: store.name.clone(), id: store.id, incarnation: store.incarnation };
            if self.known.as_ref().is_some_and(|known| *known != found) {
                note!(
                    "farside: '{}' is another store since, which was made anew: what was in it is gone",
                    self.store
                );
            }
            self.known = Some(found);
            self.opened = Some(Opened { endpoint, kv });
        }
        Ok(self.opened.as_mut().expect("it was opened above"))
    }

    /// Opens the store, if that is not done yet.
    pub(super) fn ensure(&mut self) -> Result<(), Failure> {
        self.open().map(drop)
    }
}

/// Whether nothing more will come of this session, or of the key that it has to the store.
fn is_over(error: &KvError) -> bool {
    use FabricError::{Broken, Lost, NodeDied};
    matches!(
        error,
        KvError::Fabric(NodeDied(_) | Broken { .. } | Lost { .. })
            | KvError::Store(_)
            | KvError::Refused(Status::Access)
    )
}
