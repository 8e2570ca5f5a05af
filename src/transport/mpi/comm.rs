//! A communicator of ours: the few calls that the transport makes on it.

use std::ffi::c_int;

use ::mpi::ffi;

use super::call::{Handle, mpi_call};
use crate::{ErrorKind, Result};

/// A communicator that this crate duplicated or made, with errors returned. Freed by [`free`](Self::free) only.
#[derive(Debug)]
pub(super) struct Comm {
    raw: Handle<ffi::MPI_Comm>,
    pub(super) rank: u32,
    pub(super) size: u32,
}

/// An operation under way. Dropping it doesn't end it.
#[derive(Debug)]
pub(super) struct Request(Handle<ffi::MPI_Request>);

/// What a receive brought.
#[derive(Debug, Clone, Copy)]
pub(super) struct Received {
    pub(super) from: u32,
    pub(super) bytes: usize,
}

impl Comm {
    /// Duplicates a communicator. Collective over it.
    ///
    /// # Safety
    /// `raw` is a live communicator.
    pub(super) unsafe fn duplicate(raw: ffi::MPI_Comm) -> Result<Comm> {
        let (mut inter, mut copy) = (0, raw);
        // SAFETY: `raw` is live, as the caller says.
        unsafe { mpi_call!(MPI_Comm_test_inter(raw, &mut inter)) }?;
        if inter != 0 {
            let cure = "give an intracommunicator, for example the result of MPI_Intercomm_merge".into();
            return Err(ErrorKind::Init {
                what: "the communicator given is an intercommunicator".into(),
                cure,
            }
            .into());
        }
        // SAFETY: as above.
        unsafe { mpi_call!(MPI_Comm_dup(raw, &mut copy)) }?;
        Comm::adopt(copy)
    }

    /// The ranks that share this node's memory, in the same order. Collective.
    pub(super) fn node(&self) -> Result<Comm> {
        let mut node = self.raw.0;
        // SAFETY: our communicator is live, and `node` is ours to write to.
        unsafe {
            mpi_call!(MPI_Comm_split_type(
                self.raw.0,
                ffi::RSMPI_COMM_TYPE_SHARED,
                self.rank as c_int,
                ffi::RSMPI_INFO_NULL,
                &mut node
            ))
        }?;
        Comm::adopt(node)
    }

    fn adopt(raw: ffi::MPI_Comm) -> Result<Comm> {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: `raw` was just made by MPI, for us.
        unsafe {
            mpi_call!(MPI_Comm_set_errhandler(raw, ffi::RSMPI_ERRORS_RETURN))?;
            mpi_call!(MPI_Comm_rank(raw, &mut rank))?;
            mpi_call!(MPI_Comm_size(raw, &mut size))?;
        }
        Ok(Comm {
            raw: Handle(raw),
            rank: rank as u32,
            size: size as u32,
        })
    }

    /// The raw handle.
    pub(super) fn raw(&self) -> ffi::MPI_Comm {
        self.raw.0
    }

    /// Frees the communicator. Collective.
    pub(super) fn free(self) -> Result<()> {
        let mut raw = self.raw.0;
        // SAFETY: it is ours, and as `self` ends here it isn't used again.
        unsafe { mpi_call!(MPI_Comm_free(&mut raw)) }
    }

    /// Starts to send at most `i32::MAX` bytes.
    ///
    /// # Safety
    /// The bytes stay where they are, unchanged, until the request is done.
    pub(super) unsafe fn isend(&self, bytes: &[u8], to: u32, tag: c_int) -> Result<Request> {
        // SAFETY: MPI writes a handle of the same type before anyone reads it; REQUEST_NULL is a valid start.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        let (at, count) = (bytes.as_ptr().cast(), bytes.len() as c_int);
        // SAFETY: the memory is valid for `count` bytes and stays so, as the caller says.
        unsafe { mpi_call!(MPI_Isend(at, count, ffi::RSMPI_UINT8_T, to as c_int, tag, self.raw.0, &mut request)) }?;
        Ok(Request(Handle(request)))
    }

    /// Starts to receive at most `i32::MAX` bytes, from any rank if `from` is `None`.
    ///
    /// # Safety
    /// The bytes stay where they are, and nobody else touches them, until the request is done.
    pub(super) unsafe fn irecv(&self, bytes: &mut [u8], from: Option<u32>, tag: c_int) -> Result<Request> {
        let (at, count) = (bytes.as_mut_ptr().cast(), bytes.len() as c_int);
        // SAFETY: both are constants of MPI; the request is written before anyone reads it.
        let (any, mut request) = unsafe { (ffi::RSMPI_ANY_SOURCE, ffi::RSMPI_REQUEST_NULL) };
        let from = from.map_or(any, |rank| rank as c_int);
        // SAFETY: the memory is valid for `count` bytes and stays ours, as the caller says.
        unsafe { mpi_call!(MPI_Irecv(at, count, ffi::RSMPI_UINT8_T, from, tag, self.raw.0, &mut request)) }?;
        Ok(Request(Handle(request)))
    }

    /// Starts a barrier. Collective.
    pub(super) fn ibarrier(&self) -> Result<Request> {
        // SAFETY: a constant; the request is written before anyone reads it.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        // SAFETY: our communicator is live.
        unsafe { mpi_call!(MPI_Ibarrier(self.raw.0, &mut request)) }?;
        Ok(Request(Handle(request)))
    }

    /// Starts to add up `parts`, one a rank, over all ranks; each rank gets the sum at its own place. Collective.
    pub(super) fn isum_scatter(&self, parts: Vec<u64>) -> Result<SumScatter> {
        debug_assert_eq!(parts.len(), self.size as usize);
        // SAFETY: a constant; the request is written before anyone reads it.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        let mut sum = vec![0u64];
        let (from, into) = (parts.as_ptr().cast(), sum.as_mut_ptr().cast());
        // SAFETY: one part a rank in, one out; the result keeps both, untouched, until the request is done.
        unsafe {
            mpi_call!(MPI_Ireduce_scatter_block(
                from,
                into,
                1,
                ffi::RSMPI_UINT64_T,
                ffi::RSMPI_SUM,
                self.raw.0,
                &mut request
            ))
        }?;
        Ok(SumScatter {
            request: Request(Handle(request)),
            buffers: Some((parts, sum)),
        })
    }

    /// Every rank's number, in rank order. Collective, blocking.
    pub(super) fn all_gather_number(&self, number: i32) -> Result<Vec<i32>> {
        let mut all = vec![0i32; self.size as usize];
        // SAFETY: one number in, one a rank out, and the call blocks until they are there.
        unsafe {
            mpi_call!(MPI_Allgather(
                std::ptr::from_ref(&number).cast(),
                1,
                ffi::RSMPI_INT32_T,
                all.as_mut_ptr().cast(),
                1,
                ffi::RSMPI_INT32_T,
                self.raw.0,
            ))
        }?;
        Ok(all)
    }

    /// Every rank's bytes, in rank order. Collective, blocking.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] on every rank if all bytes together are 2 GiB or more.
    pub(super) fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let too_long = || ErrorKind::Argument {
            op: "all_gather".into(),
            what: "the ranks together give 2 GiB or more; give less".into(),
        };
        // A length that doesn't fit is announced as i32::MAX, so that every rank meets the error, none waits.
        let counts = self.all_gather_number(i32::try_from(bytes.len()).unwrap_or(i32::MAX))?;
        let mut places = Vec::with_capacity(counts.len());
        let mut total = 0i32;
        for &count in &counts {
            places.push(total);
            total = total.checked_add(count).filter(|&total| total < i32::MAX).ok_or_else(too_long)?;
        }
        if total == 0 {
            // Two empty buffers may have the same address, which Open MPI takes for aliasing.
            return Ok(vec![Vec::new(); counts.len()]);
        }
        let mut all = vec![0u8; total as usize];
        // SAFETY: counts and places describe `all` exactly, and the call blocks until the bytes are there.
        unsafe {
            mpi_call!(MPI_Allgatherv(
                bytes.as_ptr().cast(),
                bytes.len() as c_int,
                ffi::RSMPI_UINT8_T,
                all.as_mut_ptr().cast(),
                counts.as_ptr(),
                places.as_ptr(),
                ffi::RSMPI_UINT8_T,
                self.raw.0,
            ))
        }?;
        Ok(counts
            .iter()
            .zip(&places)
            .map(|(&count, &at)| all[at as usize..][..count as usize].to_vec())
            .collect())
    }

    /// Sends bytes to one rank, and gives those that another one sent: at most `most`. Collective over a ring of ranks, blocking.
    pub(super) fn exchange(&self, bytes: &[u8], to: u32, from: u32, most: usize) -> Result<Vec<u8>> {
        let mut theirs = vec![0u8; most];
        let mut count = 0;
        let mut status = std::mem::MaybeUninit::<ffi::MPI_Status>::uninit();
        // SAFETY: both buffers are apart, valid for their counts, and the call blocks until MPI is done with them.
        unsafe {
            mpi_call!(MPI_Sendrecv(
                bytes.as_ptr().cast(),
                bytes.len() as c_int,
                ffi::RSMPI_UINT8_T,
                to as c_int,
                0,
                theirs.as_mut_ptr().cast(),
                most as c_int,
                ffi::RSMPI_UINT8_T,
                from as c_int,
                0,
                self.raw.0,
                status.as_mut_ptr(),
            ))
        }?;
        // SAFETY: the call has written the status, that of a receive of bytes.
        unsafe { mpi_call!(MPI_Get_count(status.as_ptr(), ffi::RSMPI_UINT8_T, &mut count)) }?;
        theirs.truncate(usize::try_from(count).unwrap_or(0));
        Ok(theirs)
    }

    /// Blocks until all ranks called it. Collective.
    pub(super) fn barrier(&self) -> Result<()> {
        // SAFETY: our communicator is live.
        unsafe { mpi_call!(MPI_Barrier(self.raw.0)) }
    }
}

/// A sum under way.
#[derive(Debug)]
pub(super) struct SumScatter {
    request: Request,
    buffers: Option<(Vec<u64>, Vec<u64>)>,
}

impl SumScatter {
    /// The sum, once, when it is there.
    pub(super) fn done(&mut self) -> Result<Option<u64>> {
        Ok(if self.request.done()? {
            self.buffers.take().map(|(_, sum)| sum[0])
        } else {
            None
        })
    }
}

impl Drop for SumScatter {
    fn drop(&mut self) {
        // If it isn't done, MPI may still write to them.
        std::mem::forget(self.buffers.take());
    }
}

impl Request {
    /// Whether the operation is done. Local; makes progress; never blocks.
    pub(super) fn done(&mut self) -> Result<bool> {
        let mut flag = 0;
        // SAFETY: the request is live, or null after it was done, which MPI_Test takes too.
        unsafe { mpi_call!(MPI_Test(&mut self.0.0, &mut flag, ffi::RSMPI_STATUS_IGNORE)) }?;
        Ok(flag != 0)
    }

    /// What a receive brought, if it is done. Local; makes progress; never blocks.
    pub(super) fn received(&mut self) -> Result<Option<Received>> {
        let (mut flag, mut count) = (0, 0);
        let mut status = std::mem::MaybeUninit::<ffi::MPI_Status>::uninit();
        // SAFETY: the request is live; the status has room for what MPI writes.
        unsafe { mpi_call!(MPI_Test(&mut self.0.0, &mut flag, status.as_mut_ptr())) }?;
        if flag == 0 {
            return Ok(None);
        }
        // SAFETY: as the flag is set, MPI has written the status.
        let status = unsafe { status.assume_init() };
        // SAFETY: the status is that of a receive of bytes.
        unsafe { mpi_call!(MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut count)) }?;
        Ok(Some(Received {
            from: status.MPI_SOURCE as u32,
            bytes: count as usize,
        }))
    }

    /// Takes back a receive that nothing was sent to, and waits until it is gone.
    pub(super) fn cancel(mut self) -> Result<()> {
        // SAFETY: the request is a live receive; MPI_Wait ends it, cancelled or done.
        unsafe {
            mpi_call!(MPI_Cancel(&mut self.0.0))?;
            mpi_call!(MPI_Wait(&mut self.0.0, ffi::RSMPI_STATUS_IGNORE))
        }
    }
}
