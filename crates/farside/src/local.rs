//! A client that belongs to one thread: no queue, no copy, no allocation per operation.
//!
//! Nothing keeps its session while the program does something else for long, and a node gives up a session of which it
//! hears nothing. The next operation then opens another, and is carried out there.

use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::pool::Pool;
use crate::reopen::{Opened, may_try_again, not_opened};
use farside_fabrics::executor::{Turns, block_on};
use farside_remote::NodeId;
pub use farside_systems::kv::Cursor;
use farside_systems::kv::{Item, Kv, KvError};
use farside_systems::registry::AnyKv;
use farside_systems::store::Members;
use farside_systems::system::Options;
use farside_systems::with_kv;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

type LocalKv = AnyKv<Rc<Endpoint>>;

/// A client of one store, for one thread and one operation at a time.
pub struct Client {
    pool: Pool,
    endpoint: Rc<Endpoint>,
    kv: LocalKv,
    options: Options,
}

impl Client {
    /// A client of the store called `name`.
    ///
    /// # Errors
    /// There is no such store, or the node has no room for one more session.
    pub fn open(pool: &Pool, name: &str) -> Result<Client, Error> {
        let options = Options::default();
        let (endpoint, kv) = only(Opened::new(pool, name, 1, &options)?);
        Ok(Client { pool: pool.clone(), endpoint, kv, options })
    }

    /// Remembers where up to `keys` keys have their slots, so that they are put in one round trip.
    pub fn with_slot_cache(self, keys: usize) -> Client {
        let options = Options { slot_cache: keys };
        let members = Members::one(NodeId(0), self.kv.store().clone());
        let kv = now(&self.endpoint, AnyKv::of(Rc::clone(&self.endpoint), &members, &options));
        Client { kv: kv.expect("it was opened before, by the same words"), options, ..self }
    }

    /// The value of `key`, where it was read to.
    ///
    /// # Errors
    /// [`KvError`]; nothing was changed.
    pub fn get(&mut self, key: &[u8]) -> Result<Option<Item<'_>>, KvError> {
        let fetched = self.carry_out(|endpoint, kv| with_kv!(kv, kv => now(endpoint, kv.fetch(key))))?;
        Ok(fetched.map(|fetched| self.kv.item(fetched)))
    }

    /// Gives `key` a value.
    ///
    /// # Errors
    /// [`KvError`], which says whether the value may have been stored.
    pub fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), KvError> {
        self.carry_out(|endpoint, kv| with_kv!(kv, kv => now(endpoint, kv.put(key, value))))
    }

    /// Takes the value of `key` away; answers whether it had one.
    ///
    /// # Errors
    /// [`KvError`], which says whether it may have been taken away.
    pub fn delete(&mut self, key: &[u8]) -> Result<bool, KvError> {
        self.carry_out(|endpoint, kv| with_kv!(kv, kv => now(endpoint, kv.delete(key))))
    }

    /// The values of several keys: `visit` is told each place in `keys` once, in any order, with what the key had at
    /// an instant of its own. One round trip for up to 64 that fit into one reply (64 KiB), the rest one by one. For
    /// PRISM-KV stores alone.
    ///
    /// # Errors
    /// [`KvError`]; nothing was changed, and of the places some may have been visited.
    pub fn get_many(
        &mut self,
        keys: &[&[u8]],
        mut visit: impl FnMut(usize, Option<Item<'_>>),
    ) -> Result<(), KvError> {
        let mut is_visited = vec![false; keys.len()];
        self.carry_out(|endpoint, kv| {
            // Over another session, those that are left.
            let places: Vec<usize> = (0..keys.len()).filter(|&place| !is_visited[place]).collect();
            let left: Vec<&[u8]> = places.iter().map(|&place| keys[place]).collect();
            let visit = |index: usize, item: Option<Item<'_>>| {
                is_visited[places[index]] = true;
                visit(places[index], item);
            };
            now(endpoint, kv.get_many(&left, visit))
        })
    }

    /// Gives several keys values: two round trips for as many as fit into one chain (16 keys, 56 KiB), the rest one
    /// by one. Each is a put of its own, without order between keys; of a key that comes twice, the later value stays.
    /// For PRISM-KV stores alone.
    ///
    /// # Errors
    /// [`KvError`]. [`Ran::No`](crate::Ran::No): none of the keys was stored; else any may have been.
    pub fn put_many(&mut self, items: &[(&[u8], &[u8])]) -> Result<(), KvError> {
        self.carry_out(|endpoint, kv| now(endpoint, kv.put_many(items)))
    }

    /// Visits the next key with its value; false at the end. No snapshot: a key that is present all the while is
    /// visited exactly once. For PRISM-KV stores alone.
    ///
    /// # Errors
    /// [`KvError`]; the cursor stays where it was.
    pub fn next(
        &mut self,
        cursor: &mut Cursor,
        mut visit: impl FnMut(&[u8], Item<'_>),
    ) -> Result<bool, KvError> {
        self.carry_out(|endpoint, kv| now(endpoint, kv.next(cursor, &mut visit)))
    }

    /// The operations as futures, for programs that drive the session themselves; not stable. A session that has ended
    /// meanwhile is not replaced.
    #[doc(hidden)]
    pub fn kv(&mut self) -> &mut LocalKv {
        &mut self.kv
    }

    /// Does an operation; once more, over another session, if this one is over and the operation was not carried out.
    fn carry_out<O>(
        &mut self,
        mut operation: impl FnMut(&Rc<Endpoint>, &mut LocalKv) -> Result<O, KvError>,
    ) -> Result<O, KvError> {
        match operation(&self.endpoint, &mut self.kv) {
            Err(error) if may_try_again(&error) => {
                self.reopen()?;
                operation(&self.endpoint, &mut self.kv)
            }
            outcome => outcome,
        }
    }

    #[cold]
    fn reopen(&mut self) -> Result<(), KvError> {
        let opened = Opened::again(&self.pool, self.kv.store(), 1, &self.options);
        (self.endpoint, self.kv) = only(opened.map_err(|error| not_opened(&error))?);
        Ok(())
    }
}

fn only(opened: Opened) -> (Rc<Endpoint>, LocalKv) {
    let Opened { endpoint, mut kvs } = opened;
    (endpoint, kvs.pop().expect("one was asked for"))
}

/// Runs an operation to its end. On these fabrics nearly all end at their first poll, so that needs no core.
fn now<O>(endpoint: &Rc<Endpoint>, operation: impl Future<Output = O>) -> O {
    let mut operation = pin!(operation);
    let polled = operation.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    endpoint.end_turn();
    match polled {
        Poll::Ready(output) => output,
        Poll::Pending => block_on(endpoint, operation),
    }
}
