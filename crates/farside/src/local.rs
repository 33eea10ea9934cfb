//! A client that belongs to one thread. An operation needs no queue, no copy and no allocation.
//!
//! Each call runs its operation on the caller's thread and returns when the operation is done. [`crate::Client`] is the
//! client for several threads or async tasks.
//!
//! Between calls nothing keeps the session alive. Over `ring:`, `udp:`, `tcp:` and `tls:`, the node ends a session
//! after 5 s of silence. The next operation then opens another session and runs over that session.
//!
//! # Example
//!
//! ```
//! # fn main() -> Result<(), farside::Error> {
//! use farside::local::Client;
//!
//! let pool = farside::connect("local:64MiB")?; // a node in this process
//! let mut client = Client::open(&pool, "default")?;
//! client.put(b"greeting", b"hello")?;
//! let item = client.get(b"greeting")?.expect("it was just stored");
//! assert_eq!(item.value, b"hello"); // borrowed from the client until its next operation
//! assert!(client.delete(b"greeting")?);
//! # Ok(())
//! # }
//! ```

use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::pool::Pool;
use crate::reopen::{Opened, may_retry, not_opened};
use farside_fabrics::executor::{Turns, block_on};
pub use farside_systems::kv::Cursor;
use farside_systems::kv::{AnyKv, Item, Kv, KvError};
use farside_systems::store::Members;
use farside_systems::system::Options;
use farside_systems::with_kv;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

type LocalKv = AnyKv<Rc<Endpoint>>;

/// A client of one store, for one thread and one operation at a time.
///
/// Each operation is linearizable. If the session is over and the operation was not carried out, the client opens
/// another session and retries once. It never retries an operation that may have been carried out.
pub struct Client {
    pool: Pool,
    endpoint: Rc<Endpoint>,
    members: Members,
    kv: LocalKv,
    options: Options,
}

impl Client {
    /// Opens the store called `name`.
    ///
    /// # Errors
    /// Nothing was changed. The store does not exist, the token has no rights to it, the node cannot be reached, or the
    /// node has no capacity for another session.
    pub fn open(pool: &Pool, name: &str) -> Result<Client, Error> {
        let options = Options::default();
        let (endpoint, members, kv) = only(Opened::new(pool, name, 1, &options)?);
        Ok(Client { pool: pool.clone(), endpoint, members, kv, options })
    }

    /// Caches the slot addresses of up to `keys` keys. Putting a key whose slot is cached takes one round trip instead
    /// of two.
    pub fn with_slot_cache(self, keys: usize) -> Client {
        let options = Options { slot_cache: keys, ..self.options };
        self.with_options(options)
    }

    /// Caches values in up to this many bytes, if the store's kind can tell that a cached value is current. Getting a
    /// key whose current value is cached takes one round trip instead of two.
    pub fn with_value_cache(self, bytes: usize) -> Client {
        let options = Options { value_cache: bytes, ..self.options };
        self.with_options(options)
    }

    /// Writes values of at least this many bytes without the node's CPU, whatever the store's own threshold is, if the
    /// store's kind has one.
    pub fn with_put_threshold(self, bytes: usize) -> Client {
        let options = Options { put_threshold: Some(bytes), ..self.options };
        self.with_options(options)
    }

    fn with_options(self, options: Options) -> Client {
        let (fabric, nodes) = (Rc::clone(&self.endpoint), self.endpoint.nodes());
        let kv = run_now(&self.endpoint, AnyKv::of(fabric, nodes, &self.members, &options));
        Client { kv: kv.expect("the store was opened before, with the same catalog entry"), options, ..self }
    }

    /// Returns the value of `key` and its version, or `None` if the key has no value. The value is borrowed from the
    /// client's buffer, without a copy.
    ///
    /// # Errors
    /// [`KvError`]; nothing was changed.
    pub fn get(&mut self, key: &[u8]) -> Result<Option<Item<'_>>, KvError> {
        let fetched = self.carry_out(|endpoint, kv| with_kv!(kv, kv => run_now(endpoint, kv.fetch(key))))?;
        Ok(fetched.map(|fetched| self.kv.item(fetched)))
    }

    /// Stores `value` under `key`, whether or not the key has a value. A key has 1 to [`KEY_MAX`](crate::KEY_MAX)
    /// bytes, a value 0 to [`VALUE_MAX`](crate::VALUE_MAX) bytes.
    ///
    /// # Errors
    /// [`KvError`]; its `ran` tells whether the value may have been stored.
    pub fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), KvError> {
        self.carry_out(|endpoint, kv| with_kv!(kv, kv => run_now(endpoint, kv.put(key, value))))
    }

    /// Deletes the value of `key`; returns whether the key had one.
    ///
    /// # Errors
    /// [`KvError`]; its `ran` tells whether the value may have been deleted.
    pub fn delete(&mut self, key: &[u8]) -> Result<bool, KvError> {
        self.carry_out(|endpoint, kv| with_kv!(kv, kv => run_now(endpoint, kv.delete(key))))
    }

    /// Whether `key` has a value. In some kinds of stores this costs less than a get.
    ///
    /// # Errors
    /// [`KvError`]; nothing was changed.
    pub fn contains(&mut self, key: &[u8]) -> Result<bool, KvError> {
        self.carry_out(|endpoint, kv| with_kv!(kv, kv => run_now(endpoint, kv.contains(key))))
    }

    /// Reads the values of several keys. Calls `visit` once per key, in any order, with the key's index in `keys` and
    /// the key's value. The result is not a snapshot: the keys are read at different instants.
    ///
    /// One round trip reads up to 64 keys, if their values fit into one reply (64 KiB); the remaining keys are read one
    /// by one. Only PRISM-KV stores support this operation.
    ///
    /// # Errors
    /// [`KvError`]; nothing was changed, and `visit` may have been called for some of the keys.
    pub fn get_many(
        &mut self,
        keys: &[&[u8]],
        mut visit: impl FnMut(usize, Option<Item<'_>>),
    ) -> Result<(), KvError> {
        let mut is_visited = vec![false; keys.len()];
        self.carry_out(|endpoint, kv| {
            // After a reconnect, reads only the keys that were not visited yet.
            let places: Vec<usize> = (0..keys.len()).filter(|&place| !is_visited[place]).collect();
            let left: Vec<&[u8]> = places.iter().map(|&place| keys[place]).collect();
            let visit = |index: usize, item: Option<Item<'_>>| {
                is_visited[places[index]] = true;
                visit(places[index], item);
            };
            run_now(endpoint, kv.get_many(&left, visit))
        })
    }

    /// Stores the values of several keys. Each key is a separate put, and different keys are stored in any order. If a
    /// key occurs twice, the later value stays.
    ///
    /// Two round trips store as many keys as fit into one chain (16 keys, 56 KiB); the remaining keys are stored one by
    /// one. Only PRISM-KV stores support this operation.
    ///
    /// # Errors
    /// [`KvError`]. If its `ran` is [`Ran::No`](crate::Ran::No), no key was stored; otherwise any of the keys may have
    /// been stored.
    pub fn put_many(&mut self, items: &[(&[u8], &[u8])]) -> Result<(), KvError> {
        self.carry_out(|endpoint, kv| run_now(endpoint, kv.put_many(items)))
    }

    /// Calls `visit` with the next key and its value; returns false at the end. Start with `Cursor::default()`.
    ///
    /// The iteration is not a snapshot. A key that is present from the iteration's start to its end is visited exactly
    /// once. Only PRISM-KV stores support this operation.
    ///
    /// # Errors
    /// [`KvError`]; the cursor does not move. After [`KvError::Rebuilt`], start again with a new cursor.
    pub fn next(
        &mut self,
        cursor: &mut Cursor,
        mut visit: impl FnMut(&[u8], Item<'_>),
    ) -> Result<bool, KvError> {
        self.carry_out(|endpoint, kv| run_now(endpoint, kv.next(cursor, &mut visit)))
    }

    /// Returns the client of the store whose operations are futures, for programs that drive the session themselves.
    /// Not stable. These operations open no new session when the session is over.
    #[doc(hidden)]
    pub fn kv(&mut self) -> &mut LocalKv {
        &mut self.kv
    }

    /// Runs an operation. Retries it once over a new session if this session is over and the operation was not carried
    /// out.
    fn carry_out<O>(
        &mut self,
        mut operation: impl FnMut(&Rc<Endpoint>, &mut LocalKv) -> Result<O, KvError>,
    ) -> Result<O, KvError> {
        match operation(&self.endpoint, &mut self.kv) {
            // Of several nodes, each gets its next session in the background, and the store's client waits for it.
            Err(error) if may_retry(&error) && self.endpoint.nodes() == 1 => {
                self.reopen()?;
                operation(&self.endpoint, &mut self.kv)
            }
            outcome => outcome,
        }
    }

    #[cold]
    fn reopen(&mut self) -> Result<(), KvError> {
        let opened = Opened::reopen(&self.pool, self.kv.store(), 1, &self.options);
        (self.endpoint, self.members, self.kv) = only(opened.map_err(|error| not_opened(&error))?);
        Ok(())
    }
}

fn only(opened: Opened) -> (Rc<Endpoint>, Members, LocalKv) {
    let Opened { endpoint, members, mut kvs } = opened;
    (endpoint, members, kvs.pop().expect("the store was opened for one task"))
}

/// Runs an operation to completion. On mapped memory, nearly all operations complete at the first poll, which needs no
/// executor.
fn run_now<O>(endpoint: &Rc<Endpoint>, operation: impl Future<Output = O>) -> O {
    let mut operation = pin!(operation);
    let polled = operation.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    endpoint.end_turn();
    match polled {
        Poll::Ready(output) => output,
        Poll::Pending => block_on(endpoint, operation),
    }
}
