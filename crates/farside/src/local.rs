//! A client that belongs to one thread: no queue, no copy, no allocation per operation.

use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::pool::Pool;
use farside_fabrics::executor::{Turns, block_on};
use farside_remote::NodeId;
use farside_systems::kv::prism_kv::PrismKv;
use farside_systems::kv::prism_kv::many::Cursor;
use farside_systems::kv::{Item, KvError};
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// A client of one store, for one thread and one operation at a time.
pub struct Client {
    endpoint: Rc<Endpoint>,
    kv: PrismKv<Rc<Endpoint>>,
}

impl Client {
    /// A client of the store called `name`.
    ///
    /// # Errors
    /// There is no such store, or the node has no room for one more session.
    pub fn open(pool: &Pool, name: &str) -> Result<Client, Error> {
        let endpoint = Rc::new(pool.endpoint()?);
        let kv = block_on(&endpoint, PrismKv::open(Rc::clone(&endpoint), NodeId(0), name))?;
        Ok(Client { endpoint, kv })
    }

    /// Remembers where up to `keys` keys have their slots, so that they are put in one round trip.
    pub fn with_slot_cache(self, keys: usize) -> Client {
        Client { kv: self.kv.with_slot_cache(keys), ..self }
    }

    /// The value of `key`, where it was read to.
    ///
    /// # Errors
    /// [`KvError`]; nothing was changed.
    pub fn get(&mut self, key: &[u8]) -> Result<Option<Item<'_>>, KvError> {
        now(&self.endpoint, self.kv.get(key))
    }

    /// Gives `key` a value.
    ///
    /// # Errors
    /// [`KvError`], which says whether the value may have been stored.
    pub fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), KvError> {
        now(&self.endpoint, self.kv.put(key, value))
    }

    /// Takes the value of `key` away; answers whether it had one.
    ///
    /// # Errors
    /// [`KvError`], which says whether it may have been taken away.
    pub fn delete(&mut self, key: &[u8]) -> Result<bool, KvError> {
        now(&self.endpoint, self.kv.delete(key))
    }

    /// Visits the next key with its value; false at the end. No snapshot: a key that is present all the while is
    /// visited exactly once.
    ///
    /// # Errors
    /// [`KvError`]; the cursor stays where it was.
    pub fn next(&mut self, cursor: &mut Cursor, visit: impl FnMut(&[u8], Item<'_>)) -> Result<bool, KvError> {
        now(&self.endpoint, self.kv.next(cursor, visit))
    }

    /// The operations as futures, and those that are not here.
    pub fn kv(&mut self) -> &mut PrismKv<Rc<Endpoint>> {
        &mut self.kv
    }
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
