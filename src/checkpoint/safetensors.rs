//! Arrays by name in a file, in the format of Hugging Face's safetensors: the length of a header (8 bytes, little endian), the header (JSON: dtype,
//! shape and place of each array), and the arrays in row-major order, little endian.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::file::{NewFile, Sum, format, io_error};
use crate::Result;
use crate::tensor::{DType, Data, Element, Tensor};

/// An array and its name.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub name: String,
    pub data: Data,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Info {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

/// The key of texts about the file, beside the arrays' names.
pub(super) const METADATA: &str = "__metadata__";

#[derive(Serialize, Deserialize, Default)]
struct Header {
    #[serde(rename = "__metadata__", default, skip_serializing_if = "BTreeMap::is_empty")]
    metadata: BTreeMap<String, String>,
    #[serde(flatten)]
    arrays: BTreeMap<String, Info>,
}

fn name_of(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "F32",
        DType::F64 => "F64",
        DType::I64 => "I64",
        DType::Bool => "BOOL",
    }
}

/// Writes arrays, the wide ones first, so that each lies at a multiple of its element's size. Each is dropped once it is written.
///
/// # Errors
/// [`ErrorKind::Checkpoint`](crate::ErrorKind::Checkpoint) for the file.
pub(super) fn write(path: PathBuf, mut entries: Vec<Entry>, metadata: BTreeMap<String, String>) -> Result<Sum> {
    entries.sort_by_key(|entry| std::cmp::Reverse(entry.data.dtype().size()));
    let mut header = Header {
        metadata,
        arrays: BTreeMap::new(),
    };
    let mut end = 0;
    for Entry { name, data } in &entries {
        let begin = end;
        end += data.bytes() as u64;
        let info = Info {
            dtype: name_of(data.dtype()).into(),
            shape: data.shape().to_vec(),
            data_offsets: (begin, end),
        };
        if name == METADATA || header.arrays.insert(name.clone(), info).is_some() {
            return Err(format(
                &path,
                format_args!("two arrays would be called `{name}`; give parameters other names"),
            ));
        }
    }
    let mut text = serde_json::to_vec(&header).map_err(|e| format(&path, e))?;
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut file = NewFile::create(path)?;
    file.write(&(text.len() as u64).to_le_bytes())?;
    file.write(&text)?;
    for Entry { data, .. } in entries {
        write_array(&mut file, data)?;
    }
    file.finish()
}

fn write_array(file: &mut NewFile, data: Data) -> Result<()> {
    fn bytes<T: bytemuck::NoUninit>(array: &ndarray::ArcArray<T, ndarray::IxDyn>) -> &[u8] {
        array.as_slice().map(bytemuck::cast_slice).unwrap_or_default()
    }
    match &data.to_contiguous() {
        Data::F32(array) => file.write(bytes(array)),
        Data::F64(array) => file.write(bytes(array)),
        Data::I64(array) => file.write(bytes(array)),
        Data::Bool(array) => file.write(bytes(array)),
        Data::Cuda(array) => array.read_in_parts(|part| file.write(part)),
    }
}

/// A file of arrays, to be read one by one.
#[derive(Debug)]
pub(super) struct Reader {
    path: PathBuf,
    file: File,
    /// Where the arrays begin.
    start: u64,
    header: BTreeMap<String, Info>,
    metadata: BTreeMap<String, String>,
}

impl Reader {
    /// Reads the header, and checks that what it says fits into the file.
    ///
    /// # Errors
    /// [`ErrorKind::Checkpoint`](crate::ErrorKind::Checkpoint) for the file.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let mut file = File::open(path).map_err(io_error(path, "open"))?;
        let size = file.metadata().map_err(io_error(path, "read"))?.len();
        let mut length = [0; 8];
        file.read_exact(&mut length).map_err(io_error(path, "read"))?;
        let length = u64::from_le_bytes(length);
        let start = length.checked_add(8).filter(|&start| start <= size);
        let start = start.ok_or_else(|| format(path, format_args!("a header of {length} bytes in a file of {size}")))?;
        let mut text = vec![0; length as usize];
        file.read_exact(&mut text).map_err(io_error(path, "read"))?;
        let Header { metadata, arrays } = serde_json::from_slice(&text).map_err(|e| format(path, e))?;
        for (name, Info { data_offsets, .. }) in &arrays {
            let (begin, end) = *data_offsets;
            if begin > end || end > size - start {
                return Err(format(
                    path,
                    format_args!("array `{name}` is at {begin}..{end} of {}", size - start),
                ));
            }
        }
        Ok(Reader {
            path: path.to_owned(),
            file,
            start,
            header: arrays,
            metadata,
        })
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.header.keys().map(String::as_str)
    }

    pub(super) fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Shape of an array.
    ///
    /// # Errors
    /// If it isn't there.
    pub(super) fn shape(&self, name: &str) -> Result<&[usize]> {
        Ok(&self.info(name)?.shape)
    }

    /// One array.
    ///
    /// # Errors
    /// [`ErrorKind::Checkpoint`](crate::ErrorKind::Checkpoint) for the file, if it isn't there, or of a dtype that there is no tensor of.
    pub(super) fn read(&mut self, name: &str) -> Result<Data> {
        let info = self.info(name)?.clone();
        self.array(name, &info)
    }

    /// Some rows of an array. Only these are read.
    ///
    /// # Errors
    /// As [`read`](Self::read); if it hasn't these rows.
    pub(super) fn read_rows(&mut self, name: &str, rows: Range<usize>) -> Result<Data> {
        let mut info = self.info(name)?.clone();
        let (begin, end) = info.data_offsets;
        match info.shape.first_mut() {
            Some(length) if rows.start <= rows.end && rows.end <= *length => {
                let row = (end - begin) / (*length).max(1) as u64;
                info.data_offsets = (begin + row * rows.start as u64, begin + row * rows.end as u64);
                *length = rows.len();
            }
            _ => {
                let what = format_args!("array `{name}` of {:?} hasn't the rows {rows:?}", info.shape);
                return Err(format(&self.path, what));
            }
        }
        self.array(name, &info)
    }

    fn info(&self, name: &str) -> Result<&Info> {
        let info = self.header.get(name);
        info.ok_or_else(|| format(&self.path, format_args!("no array `{name}`")))
    }

    fn array(&mut self, name: &str, info: &Info) -> Result<Data> {
        match info.dtype.as_str() {
            "F32" => self.elements::<f32>(name, info),
            "F64" => self.elements::<f64>(name, info),
            "I64" => self.elements::<i64>(name, info),
            "BOOL" => self.booleans(name, info),
            other => Err(format(
                &self.path,
                format_args!("array `{name}` is of dtype {other}; F32, F64, I64 and BOOL are known"),
            )),
        }
    }

    fn elements<T: Element + bytemuck::Pod>(&mut self, name: &str, info: &Info) -> Result<Data> {
        let mut elements = vec![T::zeroed(); self.count(name, info, size_of::<T>())?];
        self.read_at(info.data_offsets.0, bytemuck::cast_slice_mut(&mut elements))?;
        Ok(Tensor::from_vec(elements, info.shape.as_slice())?.data())
    }

    fn booleans(&mut self, name: &str, info: &Info) -> Result<Data> {
        let mut bytes = vec![0u8; self.count(name, info, 1)?];
        self.read_at(info.data_offsets.0, &mut bytes)?;
        let elements = bytes.iter().map(|&byte| byte != 0).collect();
        Ok(Tensor::from_vec::<bool>(elements, info.shape.as_slice())?.data())
    }

    fn read_at(&mut self, begin: u64, bytes: &mut [u8]) -> Result<()> {
        let sought = self.file.seek(SeekFrom::Start(self.start + begin));
        let read = sought.and_then(|_| self.file.read_exact(bytes));
        read.map_err(io_error(&self.path, "read"))
    }

    /// Number of elements, which the array's place must hold.
    fn count(&self, name: &str, info: &Info, size: usize) -> Result<usize> {
        let count = info.shape.iter().try_fold(1usize, |count, &n| count.checked_mul(n));
        let bytes = count.and_then(|count| count.checked_mul(size));
        let (begin, end) = info.data_offsets;
        match (count, bytes) {
            (Some(count), Some(bytes)) if bytes as u64 == end - begin => Ok(count),
            _ => Err(format(
                &self.path,
                format_args!("array `{name}` of {} {:?} is {} bytes", info.dtype, info.shape, end - begin),
            )),
        }
    }
}
